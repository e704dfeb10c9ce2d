"""The ranks of ``megakv serve``: all run one loop, and beside rank 0 a process speaks HTTP."""

from __future__ import annotations

import argparse
import gc
import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

from megakv.launcher.process import importing, own_rank, rank_arguments

with importing():
    from transformers import PreTrainedTokenizerBase

    from megakv.engine.build import init_inference
    from megakv.engine.engine import MegaKVEngine
    from megakv.launcher.commands.serve import add_arguments, http_settings, loop_settings
    from megakv.launcher.conversation import read_tokenizer
    from megakv.launcher.job import print_files
    from megakv.launcher.settings import check_engine_arguments, check_files, run_config
    from megakv.serving.api import ApiProcess
    from megakv.serving.http.settings import listening_socket
    from megakv.serving.loop import ServingLoop
    from megakv.serving.stats import TrafficLog
    from megakv.tracking.config import TrackingConfig
    from megakv.tracking.files import write_whole
    from megakv.tracking.page import page
    from megakv.tracking.report import RunReport, report_to_json
    from megakv.tracking.tracker import Tracker


def main() -> None:
    """Entry of every rank."""
    with rank_arguments(__doc__, add_arguments) as arguments, ExitStack() as stack:
        check_engine_arguments(arguments)
        settings, config = loop_settings(arguments), run_config(arguments)
        if config.megakv.tracking.timeline is not None:
            raise ValueError("megakv.tracking.timeline of a server would have no end: leave it out")
        api = None
        if own_rank() == 0:
            # What cannot be is said before weights are read; from then on clients hear that they are.
            check_files(arguments)
            http = http_settings(arguments)
            with listening_socket(http) as listener:
                api = ApiProcess(http, listener)
            stack.callback(api.close)
        tokenizer = read_tokenizer(arguments.model)
        # The engine would record events of every pass for W&B's timeline.
        tracking, config.megakv.tracking = config.megakv.tracking, TrackingConfig()
        tracker = Tracker(tracking, config.model_dump(mode="json", by_alias=True, fallback=str), own_rank())
        stack.callback(tracker.close)
        with init_inference(arguments.model, config) as engine:
            loop = ServingLoop(engine, settings)
            if api is None:
                # Asked to end, it is gone at once, whatever it waits for: a handler would run when that is over.
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                gc.freeze()
                loop.run()
                engine.report()
                return
            report = _serve(engine, loop, api, tokenizer, tracker, arguments)
            tracker.log_report(report)
        written, upload = tracker.written, tracker.wandb_upload
        for name, content in (("json", report_to_json), ("report", lambda report: page([("serve", report)]))):
            if (path := getattr(arguments, name)) is not None:
                write_whole(path, content(report).encode())
                written[name] = Path(path).resolve()
        print_files(written.items(), upload)


def _serve(
    engine: MegaKVEngine,
    loop: ServingLoop,
    api: ApiProcess,
    tokenizer: PreTrainedTokenizerBase,
    tracker: Tracker,
    arguments: argparse.Namespace,
) -> RunReport:
    """On rank 0: the loop, with a process beside it that speaks HTTP, until drained; returns what was done."""
    from megakv.serving.http.call import ServedModel

    api.serve(loop, ServedModel.of(engine.module, tokenizer, api.settings.model))
    signal.signal(signal.SIGTERM, lambda *_: api.drain())
    if arguments.pid_file:
        # On another host than the command's its folder is not there, and a signal has to be sent there.
        with suppress(OSError):
            write_whole(arguments.pid_file, str(os.getpid()).encode())
    host, port = api.address
    where = f"CP {engine.mesh.cp_size} x TP {engine.mesh.tp_size}"
    address = f"[{host}]" if ":" in host else host
    print(f"megakv: {api.settings.model} on {where} at http://{address}:{port} (pid {os.getpid()})", flush=True)
    log = TrafficLog(loop.stats, tracker)
    # What is there by now stays: looking through it took 50 ms, in which no stream had a token.
    gc.freeze()
    try:
        with log:
            loop.run()
    finally:
        # Clients read the end of their answers, or that a rank was lost.
        api.close()
    report = engine.report()
    report.served = traffic = log.traffic()
    report.prompt_tokens, report.new_tokens = traffic.prompt_tokens, traffic.new_tokens
    report.settings = {name: value for name, value in vars(arguments).items() if value is not None}
    return report


if __name__ == "__main__":
    main()
