"""The engines that are measured. Each file is run by `minillm.bench.worker`, in a process of its own; none is imported.

An engine is a class `Engine` with these methods. Tokens are ids; times are in seconds.

    load(path, threads, **options)    read the model; returns what is to be known about it (a dict)
    prefill(tokens, repeats)    compute one prompt from nothing, so often; returns the time of each
    fill(prompts)               put sequences of equal length into the KV cache, to be continued by `decode`
    decode(tokens, repeats)     compute one new token for each sequence, so often, always at the same position
    logits(tokens, path)        write the scores after every token, float32 [T, V], to an .npy file

Ours has one more, about which nobody else is asked:

    serve(prompts, answer_lengths, clients, **options)    serve them all; returns how each fared
"""
