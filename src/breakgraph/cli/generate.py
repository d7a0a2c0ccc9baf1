"""`breakgraph generate`: answers to prompts from the command line or from standard input."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from breakgraph.cli import engine_options as options
from breakgraph.errors import ConfigError

if TYPE_CHECKING:
    from breakgraph.engine.llm import LLM
    from breakgraph.engine.outputs import RequestOutput


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "generate",
        help="generate text",
        description="Generate text. Without a prompt option, standard input is the prompt.",
        allow_abbrev=False,
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    prompts.add_argument("--chat", action="append", metavar="TEXT", help="a user message, put into the chat template")
    prompts.add_argument(
        "--prompt-token-ids", action="append", type=options.int_list, metavar="1,2,3", help="may be given several times"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: outputs and stats")
    options.add_sampling_options(parser)
    options.add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the answers; everything else goes to standard error."""
    params = options.sampling_params(args)
    prompts = _prompts(args)
    from breakgraph.engine.llm import LLM

    with LLM(**options.engine_options(args)) as llm:
        outputs = _chat(llm, prompts, params) if args.chat else llm.generate(prompts, params)
        if args.json:
            print(json.dumps({"outputs": [dataclasses.asdict(output) for output in outputs], "stats": llm.stats()}))
        else:
            _print_text(outputs, has_text=llm.tokenizer is not None)
    return 0


def _prompts(args: argparse.Namespace) -> list[Any]:
    if args.load_format == "dummy" and not args.prompt_token_ids:
        # Said before the model is made; the engine would say it after.
        raise ConfigError("--load-format dummy has no tokenizer; give the prompt as --prompt-token-ids 1,2,3")
    given = args.prompt or args.chat or args.prompt_token_ids
    if given:
        return list(given)
    if sys.stdin.isatty():
        raise ConfigError("no prompt: give --prompt, --chat or --prompt-token-ids, or write one to standard input")
    return [sys.stdin.read().rstrip("\n")]


def _chat(llm: LLM, messages: list[str], params: Any) -> list[RequestOutput]:
    return llm.chat([[{"role": "user", "content": message}] for message in messages], params)


def _print_text(outputs: list[RequestOutput], *, has_text: bool) -> None:
    completions = [completion for output in outputs for completion in output.outputs]
    for number, completion in enumerate(completions, start=1):
        if len(completions) > 1:
            print(f"--- {number} of {len(completions)}")
        print(completion.text if has_text else ",".join(map(str, completion.token_ids)))
