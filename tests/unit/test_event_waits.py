"""Waits for events of a GPU, without one: C functions that answer like the driver's query."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import pytest

from freescale.transport import event_waits
from freescale.transport.event_waits import HAPPENED, load_poll, wait_for_event

NOT_READY = 600  # CUDA_ERROR_NOT_READY
# abs(), called with the number of an event, answers with that number: event 600 never happens
ANSWERS = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value


@pytest.fixture
def poll():
    found = load_poll()
    if found is None:
        pytest.skip("needs a C compiler")
    return found


@pytest.mark.parametrize("answer", [HAPPENED, NOT_READY, 201])
def test_the_last_answer_of_the_driver_is_returned(poll, answer):
    assert poll(ANSWERS, answer, 1e-4) == answer


def test_another_thread_can_make_happen_what_a_thread_polls_for(poll):
    """It needs the interpreter for that. atoi() answers with the number in an event's memory."""
    query = ctypes.cast(ctypes.CDLL(None).atoi, ctypes.c_void_p).value
    event, polling, answers = ctypes.create_string_buffer(b"600"), threading.Event(), []

    def work():
        polling.set()
        answers.append(poll(query, ctypes.addressof(event), 2.0))

    thread = threading.Thread(target=work)
    thread.start()
    polling.wait()
    event[0] = b"0"  # one byte, so that no other number is ever there
    thread.join()
    assert answers == [HAPPENED]


@pytest.mark.parametrize(("number", "sleeps"), [(HAPPENED, False), (NOT_READY, True), (201, True)])
def test_a_thread_sleeps_for_what_has_not_happened_after_a_moment(
    poll, monkeypatch, number, sleeps
):
    """And asks torch, which raises it, for what went wrong."""
    monkeypatch.setattr(event_waits, "find_query", lambda: ANSWERS)
    slept = []
    event = SimpleNamespace(cuda_event=number, synchronize=lambda: slept.append(number))
    wait_for_event(event)
    assert slept == [number] * sleeps


@pytest.mark.parametrize("lacking", ["load_poll", "find_query"])
def test_without_a_compiler_or_driver_it_sleeps_at_once(monkeypatch, lacking):
    monkeypatch.setattr(event_waits, "find_query", lambda: ANSWERS)
    monkeypatch.setattr(event_waits, lacking, lambda: None)
    slept = []
    wait_for_event(SimpleNamespace(cuda_event=HAPPENED, synchronize=lambda: slept.append(1)))
    assert slept == [1]
