"""Groups of real processes for the tests of ranks: forked from one program that imported everything once.

Reads a line of JSON for every group, `{"deed": name, "size": W, ...}`, forks W ranks that do the deed (of
`rank_deeds`), and answers with a line: a report a rank, `{"result" or "error", "seconds"}`; a rank that died
reports `{"died": exit code}`. Nothing is waited for longer than a minute.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import rank_deeds
import torch

_PATIENCE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def be_rank(rank: int, order: dict[str, Any], folder: str) -> None:
    begin = time.monotonic()
    try:
        report = {"result": getattr(rank_deeds, order["deed"])(rank, order, folder)}
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    report["seconds"] = time.monotonic() - begin
    part = Path(folder) / f"{rank}.part"
    part.write_text(json.dumps(report))
    part.rename(Path(folder) / f"{rank}.json")


def run(order: dict[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        order["port"] = free_port()
        children = {}
        for rank in range(order["size"]):
            pid = os.fork()
            if pid == 0:
                be_rank(rank, order, folder)
                os._exit(0)
            children[rank] = pid
        codes: dict[int, int] = {}
        end = time.monotonic() + _PATIENCE_S
        while len(codes) < len(children):
            for rank in children.keys() - codes.keys():
                pid, status = os.waitpid(children[rank], os.WNOHANG)
                if pid:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    os.kill(children[rank], signal.SIGKILL)
            time.sleep(0.005)
        files = [Path(folder) / f"{rank}.json" for rank in children]
        return [
            json.loads(file.read_text()) if file.exists() else {"died": codes[rank]}
            for rank, file in enumerate(files)
        ]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TileLang prints is no answer
    torch.set_num_threads(1)  # a thread pool would not survive the fork
    rank_deeds.compile_all()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
