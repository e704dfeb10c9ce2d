"""Run a prompt through any causal language model: ``deepspeed launcher/run.py --model DIR --config X.json ...``."""

from __future__ import annotations

import argparse

from megakv.launcher.process import (
    importing,
    own_rank,
    quiet_libraries,
    report_errors,
)
from megakv.launcher.prompts import add_question_arguments, questions, read_document
from megakv.launcher.settings import add_job_arguments

with importing():
    from megakv.launcher.job import JobParser, print_outcome, publish, run_job


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = JobParser(description="Generate with any Hugging Face causal language model on all ranks.")
    parser.add_argument("--model", required=True, help="directory, GGUF file or hub id of the model")
    add_question_arguments(parser)
    add_job_arguments(parser)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    """Entry of every rank."""
    quiet_libraries()
    with report_errors():
        arguments = parse_arguments()
        asked = questions(read_document(arguments), arguments.question)
        outcome = run_job(arguments.model, arguments, lambda _: asked, chat=not arguments.no_chat_template)
        if own_rank() == 0:
            print_outcome(outcome)
            publish(outcome, arguments)
            if outcome.wrong:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
