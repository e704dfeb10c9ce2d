"""The main job: several ranks read a long document together and say the number hidden in it."""

from __future__ import annotations

import argparse
import sys

import numpy as np
from task import MODEL_DIR, Document, is_correct, prompt, question
from transformers import PreTrainedTokenizerBase

from megakv.launcher.job import JobParser, print_outcome, publish, run_job
from megakv.launcher.process import own_rank, quiet_libraries, report_errors
from megakv.launcher.prompts import Question, read_text
from megakv.launcher.settings import add_job_arguments


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = JobParser(description="Find a number hidden in a long document.")
    add_job_arguments(parser)
    parser.add_argument("--model", default=str(MODEL_DIR), help="directory of the model (default: this recipe's)")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the made-up document (default 4096)")
    parser.add_argument("--depth", type=float, help="where the number lies, 0 to 1 (default: anywhere)")
    parser.add_argument("--prompt-file", help="your own UTF-8 text in place of a made-up document")
    parser.add_argument("--question", help=f"what to ask of your own text (default: {question()!r})")
    parser.set_defaults(max_new_tokens=12)
    return parser.parse_args()


class Prompter:
    """Makes the prompt, and remembers the number that is hidden in it."""

    def __init__(self, arguments: argparse.Namespace):
        self._arguments = arguments
        self.number: str | None = None

    def __call__(self, tokenizer: PreTrainedTokenizerBase) -> list[Question]:
        asked = self._arguments
        if asked.prompt_file is not None:
            what = asked.question or question()
            return [Question(what, f"{read_text(asked.prompt_file, '--prompt-file').rstrip()}\n\n{what}")]
        if asked.question is not None:
            raise ValueError("--question needs --prompt-file: the made-up document has a question of its own")
        if asked.depth is not None and not 0 <= asked.depth <= 1:
            raise ValueError(f"--depth {asked.depth}: allowed: 0 (beginning) to 1 (end)")
        rng = np.random.default_rng(asked.seed)
        depth = float(rng.random()) if asked.depth is None else asked.depth
        document: Document = prompt(asked.tokens, depth, rng, tokenizer)
        self.number = document.number
        return [Question(question(), document.text)]


def main() -> None:
    """Entry of every rank."""
    quiet_libraries()
    with report_errors():
        arguments = parse_arguments()
        prompter = Prompter(arguments)
        outcome = run_job(arguments.model, arguments, prompter, chat=False)
        correct = None if prompter.number is None else is_correct(outcome.answer, prompter.number)
        if own_rank() == 0:
            print_outcome(outcome)
            if prompter.number is not None:
                verdict = "correct" if correct else "WRONG"
                print(f"hidden number {prompter.number}, answer {outcome.answer.strip()!r}: {verdict}")
            publish(outcome, arguments, correct=correct, expected=prompter.number)
        if own_rank() == 0 and (correct is False or outcome.wrong):
            sys.stdout.flush()
            raise SystemExit(1)


if __name__ == "__main__":
    main()
