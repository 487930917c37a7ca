"""Which blocks of a request's table still have its contents. No vLLM needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvferry.client.vllm.block_owners import BlockOwners, RequestBlocks

PER_CHUNK = 2


def scheduler(**tables: list[int]) -> Any:
    """vLLM's offloading scheduler, with one group. tables: the blocks of each request, all but the
    last of which are full."""
    requests = {
        name: SimpleNamespace(
            req=SimpleNamespace(
                num_tokens=len(table) - 1,
                block_hashes=[f"{name} {n}".encode() for n in range(len(table) - 1)],
            ),
            group_states=[SimpleNamespace(block_ids=list(table), next_stored_chunk_idx=0)],
        )
        for name, table in tables.items()
    }
    group = SimpleNamespace(group_idx=0, hashes_per_chunk=PER_CHUNK, tokens_per_block=1)
    return SimpleNamespace(
        config=SimpleNamespace(kv_group_configs=[group], blocks_per_chunk=PER_CHUNK),
        _req_status=requests,
        _calc_num_offloadable_tokens=lambda _, tokens: tokens,
    )


def owners_of(vllm: Any) -> BlockOwners:
    """Each request was scheduled with its table, in a step of its own; another step begins."""
    owners = BlockOwners()
    for name, status in vllm._req_status.items():
        owners.begin_step(vllm, [(name, [status.group_states[0].block_ids], True)])
    owners.begin_step(vllm, ())
    return owners


def load_to(owners: BlockOwners, *blocks: tuple[int, bytes | None]) -> None:
    """blocks: ids and hashes of the blocks of a request that loads."""
    table = [SimpleNamespace(block_id=b, block_hash=h, is_null=not b) for b, h in blocks]
    owners.allocate_for_load(SimpleNamespace(blocks=[table]))


def test_blocks_are_equal_only_with_the_same_group_and_prefix() -> None:
    one, other = RequestBlocks(0, [b"a", b"b"], 1), RequestBlocks(0, [b"a", b"c"], 1)
    assert one.has(0, (other, 0))
    assert not one.has(0, (other._replace(group=1), 0))
    assert not one.has(1, (other, 1))
    # Without a hash, only the same position of the same request.
    assert one.has(2, (one, 2))
    assert not one.has(2, (other, 2))
    assert not one.has(1, (other, 2))
    # The hash of a block is that of its last tokens.
    assert one._replace(per_block=2).has(0, (RequestBlocks(0, [b"b"], 1), 0))


def test_nothing_is_stored_from_blocks_that_are_given_to_a_load() -> None:
    """The blocks with a hash are those that the loading request has found on the GPU."""
    vllm = scheduler(one=[1, 2, 3, 4, 5])
    owners = owners_of(vllm)
    load_to(owners, (0, None), (1, b"one 0"), (3, None), (4, None))
    owners.drop_foreign_blocks(vllm, ["one"], ())
    assert vllm._req_status["one"].group_states[0].block_ids == [1, 2, 0, 0, 5]


def test_stored_blocks_are_stored_again_only_at_the_end_of_a_request() -> None:
    vllm = scheduler(one=[1, 2, 3, 4, 5])
    owners = owners_of(vllm)
    (state,) = vllm._req_status["one"].group_states
    state.next_stored_chunk_idx = 1
    load_to(owners, (1, None))
    owners.drop_foreign_blocks(vllm, ["one"], ())
    assert state.block_ids == [1, 2, 3, 4, 5]
    owners.drop_foreign_blocks(vllm, (), ["one"])
    assert state.block_ids == [0, 0, 3, 4, 5]


def test_a_block_that_is_not_full_is_kept() -> None:
    vllm = scheduler(one=[1, 2, 3, 4])
    owners = owners_of(vllm)
    load_to(owners, (3, None))
    owners.drop_foreign_blocks(vllm, ["one"], ())
    assert vllm._req_status["one"].group_states[0].block_ids == [1, 2, 0, 4]


def test_a_request_that_has_a_block_later_has_its_contents() -> None:
    vllm = scheduler(one=[1, 2, 3, 4, 5], two=[3, 6, 0, 4])
    owners = owners_of(vllm)
    owners.drop_foreign_blocks(vllm, ["one", "two"], ())
    assert vllm._req_status["one"].group_states[0].block_ids == [1, 2, 0, 0, 5]
    assert vllm._req_status["two"].group_states[0].block_ids == [3, 6, 0, 4]


def test_blocks_that_a_step_adds_are_the_request_s() -> None:
    """They are not looked at: a prompt that the GPU's cache serves may bring thousands."""
    vllm = scheduler(one=[1, 2, 3, 4, 5])
    (state,) = vllm._req_status["one"].group_states
    owners = owners_of(vllm)
    load_to(owners, (1, None), (3, None))
    state.block_ids, added = [1, 2], [3, 4, 5]
    owners.begin_step(vllm, [("one", [added], False)])
    state.block_ids += added
    owners.drop_foreign_blocks(vllm, ["one"], ())
    assert state.block_ids == [0, 0, 3, 4, 5]
