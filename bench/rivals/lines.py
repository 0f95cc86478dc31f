"""The rival's side of bench/rival.py: one JSON line in, one out. Runs in the rival's venv: standard library only."""

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def serve(start):
    """Answer requests with the methods of start(stack) until standard input ends, then undo what `stack` holds."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the rival's own chatter goes to the log

    def say(**answer):
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    with contextlib.ExitStack() as stack:
        try:
            subject = start(stack)
        except BaseException as exc:
            say(error=f"does not start here: {exc!r:.300}")
            raise
        say(value="ready")
        for line in sys.stdin:
            op, args = json.loads(line)
            try:
                say(value=getattr(subject, op)(**args))
            except Exception as exc:
                say(error=f"{op}: {exc!r:.300}")
                raise


def free_port():
    """A TCP port of the loopback that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def folder(stack):
    """A temporary folder."""
    path = Path(tempfile.mkdtemp(prefix="kvtier-rival-"))
    stack.callback(shutil.rmtree, path, ignore_errors=True)
    return path


started = []


def daemon(stack, command, **env):
    """Start a program that ends when the stack does; its output goes to the log."""
    process = subprocess.Popen([str(part) for part in command], stdout=sys.stderr, env={**os.environ, **env})
    started.append(process)

    def end():
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)
    return process


def wait_for(ready, timeout_s=30.0):
    """Wait until ready() is true, or a program that was started has ended."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if any(process.poll() for process in started):
            raise ChildProcessError("a program that it needs ended at once: its log says why")
        if time.monotonic() > deadline:
            raise TimeoutError("it was not ready in time")
        time.sleep(0.05)


def listens(port):
    """Whether somebody listens on a loopback port."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def seconds(call):
    """How long call() takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_us(calls):
    """Microseconds of the median of these calls."""
    return statistics.median(map(seconds, calls)) * 1e6
