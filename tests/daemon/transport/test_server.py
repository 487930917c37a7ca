"""How the server arranges what it sends."""

from __future__ import annotations

from kvferry.daemon.core.actions import Send
from kvferry.daemon.transport.server import merge_results
from kvferry.proto.messages import Done, Finished, JobResult, Outcome, Waited
from kvferry.proto.specs import Direction


def result(job_id: int) -> JobResult:
    return JobResult(job_id, Direction.LOAD, Outcome.DONE)


def test_results_of_a_session_go_in_one_message_and_pass_no_other_result() -> None:
    """Whatever else is sent keeps its place behind the results that it follows."""
    actions = [
        Send("a", Done(1)),
        Send("a", Finished((result(1),))),
        Send("b", Finished((result(7),))),
        Send("a", Waited(2)),
        Send("a", Finished((result(2), result(3)))),
        Send("a", Waited(3)),
        Send("b", Finished((result(8),))),
    ]
    assert merge_results([*actions]) == [
        Send("a", Done(1)),
        Send("a", Finished((result(1), result(2), result(3)))),
        Send("b", Finished((result(7), result(8)))),
        Send("a", Waited(2)),
        Send("a", Waited(3)),
    ]
