"""Another user of the machine reads and writes at every door of a run that is open on the loopback interface.

What this does not exercise: connections to gloo's own ports while groups are made (docs/limits.md).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
STRANGER = """
import encodings.idna, os, socket, sys, time  # all before its rights are gone
os.setgid(65534); os.setgroups([]); os.setuid(65534)
store = b"\\x3c\\x85\\xf7\\xce\\x01"  # what a client of torch's TCPStore says first: VALIDATE, 0x3C85F7CE
opened, refused = [], 0
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    for line in open("/proc/net/tcp").read().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        port = int(local.partition(":")[2], 16)
        if state == "0A" and port not in opened:
            opened.append(port)
            for words in (store, b"\\0" * 3, b"GET / HTTP/1.0\\r\\n\\r\\n"):
                try:
                    guest = socket.create_connection(("127.0.0.1", port), 1)
                    guest.sendall(words)
                    opened.append(guest)
                except OSError:
                    pass
    for folder in [name for name in os.listdir(sys.argv[2]) if name.startswith("verifier-")]:
        for act in (os.listdir, lambda path: open(path + "/socket", "w"), os.rmdir):
            try:
                act(os.path.join(sys.argv[2], folder))
                print("entered", folder, flush=True)
            except OSError:
                refused += 1
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat("/proc/" + pid).st_uid == 0:
                os.listdir(f"/proc/{pid}/fd")
                print("read the descriptors of", pid, flush=True)
        except OSError:
            pass
    time.sleep(0.02)
print(len(opened), refused, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_second_user_cannot_disturb_a_run(tmp_path):
    temporary = Path(subprocess.check_output(["mktemp", "-d"], text=True, timeout=10).strip())
    temporary.chmod(0o1777)
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "verifier", "roundtrip", "--model", "tiny:qwen3", "--tp", "2", "--cycles", "1"]
    with subprocess.Popen(
        [*command, "--engine", "hf", "--trace", str(tmp_path / "trace")], cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as run:  # fmt: skip
        time.sleep(2)
        with subprocess.Popen(
            [sys.executable, "-S", "-c", STRANGER, "25", str(temporary)], stdout=subprocess.PIPE, text=True
        ) as stranger:
            said = run.communicate(timeout=200)[0]
            *entered, counts = stranger.communicate(timeout=60)[0].splitlines()
    assert run.returncode == 0, said[-2000:]
    assert entered == []
    opened, refused = map(int, counts.split())
    assert opened > 3, "the stranger found no open port: the test shows nothing"
    assert refused > 3
    assert list(temporary.glob("verifier-*")) == []
    shutil.rmtree(temporary)
