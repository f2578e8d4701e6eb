"""The engines that are measured. `minillm.bench.worker` runs each file in its own process; none is imported.

Each file defines `ENGINE`, a class with these methods. Tokens are ids; times are in seconds.

    load(path, threads, **options)    read the model; return facts about it (a dict)
    prefill(tokens, repeats)          compute one prompt from the start, `repeats` times; return the time of each
    fill(prompts)                     put sequences of equal length into the KV cache, for `decode` to continue
    decode(tokens, repeats)           compute one new token per sequence, `repeats` times, always at the same position
    logits(tokens, path)              write the logits after every token, float32 [T, V], to an .npy file

minillm has one more method:

    serve(prompts, answer_lengths, clients, **options)    serve all requests; return the metrics of the run
"""
