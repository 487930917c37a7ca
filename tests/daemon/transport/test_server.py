"""How the server arranges what it sends."""

from __future__ import annotations

from kvferry.daemon.core.actions import SendMessage
from kvferry.daemon.transport.outbox import merge_results
from kvferry.proto.messages import Done, Finished, JobResult, Outcome, Waited
from kvferry.proto.specs import Direction


def result(job_id: int) -> JobResult:
    return JobResult(job_id, Direction.LOAD, Outcome.DONE)


def test_results_of_a_session_go_in_one_message_and_pass_no_other_result() -> None:
    """Whatever else is sent keeps its place behind the results that it follows."""
    actions = [
        SendMessage("a", Done(1)),
        SendMessage("a", Finished((result(1),))),
        SendMessage("b", Finished((result(7),))),
        SendMessage("a", Waited(2)),
        SendMessage("a", Finished((result(2), result(3)))),
        SendMessage("a", Waited(3)),
        SendMessage("b", Finished((result(8),))),
    ]
    assert merge_results([*actions]) == [
        SendMessage("a", Done(1)),
        SendMessage("a", Finished((result(1), result(2), result(3)))),
        SendMessage("b", Finished((result(7), result(8)))),
        SendMessage("a", Waited(2)),
        SendMessage("a", Waited(3)),
    ]
