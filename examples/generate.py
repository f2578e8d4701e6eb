"""Generate text from a prompt, and print how long it took.

    python examples/generate.py "Why is the sky blue?"
    python examples/generate.py --raw "Once upon a time" --temperature 0.8 --seed 1
    python examples/generate.py --trace run.jsonl       # then: minillm trace run.jsonl --open

To follow a token through the code, set a breakpoint in `Engine.step` or `Transformer.forward`. Add `--backend numpy` to
step into the arithmetic as well. Set NUMBA_DISABLE_JIT=1 to step through the kernels themselves.
"""

import argparse
import sys

from minillm import cli


def main() -> None:
    """Read the options, load the model, stream the answer and print its metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_prompt_options(parser)
    cli.add_model_options(parser)
    cli.add_sampling_options(parser)
    cli.add_record_option(parser)
    options = parser.parse_args()

    llm = cli.load_model(options)
    prompt = options.prompt
    if options.chat or (options.chat is None and llm.can_chat):
        prompt = llm.encode_chat([{"role": "user", "content": prompt}])
    else:
        print(prompt, end="")
    with cli.recorded(llm, options.trace):
        for delta in llm.stream(prompt, cli.sampling_params(options)):
            print(delta.text, end="", flush=True)
    print("\n")
    print(cli.summary(delta.metrics))


if __name__ == "__main__":
    sys.exit(cli.run_safely(main))
