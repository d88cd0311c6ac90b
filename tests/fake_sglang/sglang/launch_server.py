"""A server process with SGLang's command line, its routes beside the API, and a child process, but no model.

Its own arguments: `--notes FOLDER` takes a file of its arguments, `--end-after N` ends it with exit code 3 at the Nth
request, the first time that it is started with these notes, and `--fail` before it answers at all.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.fake_openai import FakeOpenAI, running


def value_of(flag: str, default: str = "") -> str:
    arguments = sys.argv[1:]
    return arguments[arguments.index(flag) + 1] if flag in arguments else default


def main() -> None:
    print("loading nothing", flush=True)
    if "--fail" in sys.argv:
        print("error: this model cannot be loaded", flush=True)
        raise SystemExit(1)
    notes = Path(value_of("--notes"))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    starts = len(list(notes.glob("start-*.json")))
    info = {"max_total_num_tokens": int(value_of("--max-total-tokens", "4096")), "schedule_policy": "fcfs"}
    pages = {
        "/v1/models": {"object": "list", "data": [{"id": "m", "owned_by": "sglang"}]},
        "/server_info": info,
        "/health": "ok",
    }
    server = FakeOpenAI(pages=pages, latency_s=float(value_of("--latency", "0")))
    ended = threading.Event()

    def end(_signum: int, _frame: object) -> None:
        child.terminate()
        ended.set()

    signal.signal(signal.SIGTERM, end)
    with running(server, int(value_of("--port"))):
        document = {"arguments": sys.argv[1:], "pid": os.getpid(), "child": child.pid}
        (notes / f"start-{starts}.json").write_text(json.dumps(document))
        end_after = int(value_of("--end-after", "0")) if starts == 0 else 0
        while not ended.wait(0.02):
            (notes / f"posted-{starts}").write_text(" ".join(server.posted))
            if end_after and len(server.requests) >= end_after:
                print("out of everything", flush=True)
                os._exit(3)


main()
