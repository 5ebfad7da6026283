"""Background threads: torch works on one core there, and on all of them in the main thread."""

from __future__ import annotations

import queue
import subprocess
import sys

import pytest
import torch

from freescale.data.batches.workers import prefetch
from freescale.transport.threads import start_thread


def test_a_background_thread_has_one_core_and_the_others_keep_theirs():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found: queue.SimpleQueue[int] = queue.SimpleQueue()
        thread = start_thread("test", lambda: found.put(torch.get_num_threads()), lambda: None)
        thread.join()
        assert found.get() == 1
        assert list(prefetch(torch.get_num_threads() for _ in range(2))) == [1, 1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_its_operations_start_no_team():
    """In a process of its own: teams stay for as long as their thread does."""
    program = """
import os
import torch
from freescale.transport.threads import start_thread

torch.set_num_threads(4)
before, after = [], []

def count_threads():
    return len(os.listdir('/proc/self/task'))

def work():
    before.append(count_threads())
    torch.ones(1 << 20).add_(1)
    after.append(count_threads())

start_thread("test", work, lambda: None).join()
torch.ones(1 << 20).add_(1)
print(after[0] - before[0], count_threads() >= before[0] - 1 + 3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["0", "True"], done.stderr
