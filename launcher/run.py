"""Run a prompt through any causal language model: ``deepspeed launcher/run.py --model DIR --config X.json ...``."""

from __future__ import annotations

import argparse

from megakv.launcher.process import importing, own_rank, quiet_libraries, report_errors
from megakv.launcher.prompts import read_text

with importing():
    from megakv.launcher.job import JobParser, add_job_arguments, print_outcome, run_job, write_outcome


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = JobParser(description="Generate with any Hugging Face causal language model on all ranks.")
    parser.add_argument("--model", required=True, help="directory or hub id of the model")
    add_job_arguments(parser)
    parser.add_argument("--prompt-file", help="UTF-8 text; standard input is not read")
    parser.add_argument("--question", help="appended to the text of --prompt-file, or the whole prompt without one")
    parser.add_argument("--no-chat-template", action="store_true", help="feed the text as it is")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def make_text(arguments: argparse.Namespace) -> str:
    """The prompt's text."""
    if arguments.prompt_file is None and not arguments.question:
        raise ValueError("the prompt is empty: give --prompt-file, --question or both")
    parts = [] if arguments.prompt_file is None else [read_text(arguments.prompt_file, "--prompt-file")]
    return "\n\n".join([*parts, *([arguments.question] if arguments.question else [])])


def main() -> None:
    """Entry of every rank."""
    quiet_libraries()
    with report_errors():
        arguments = parse_arguments()
        text = make_text(arguments)
        outcome = run_job(arguments.model, arguments, lambda _: text, chat=not arguments.no_chat_template)
        if own_rank() == 0:
            print_outcome(outcome)
            if arguments.json:
                write_outcome(arguments.json, outcome.to_json())


if __name__ == "__main__":
    main()
