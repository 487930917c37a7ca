"""No host finds a block of another epoch in a shared store, and all agree in the end."""

from __future__ import annotations

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from kvferry.daemon.tiers.mooncake.epochs import OBJECT_BYTES
from kvferry.daemon.tiers.mooncake.store_client import NO_SPACE, TRANSFER_FAILED
from support.mooncake_hosts import POINTER, ModelHost, check_agreement
from support.object_store_model import ObjectStoreModel

HOSTS = range(3)
NUMBERS = st.sampled_from(HOSTS)
# In the middle of what a host does, after so many operations: another host, and what it does.
INTERRUPTS = st.dictionaries(
    st.integers(0, 9), st.tuples(NUMBERS, st.sampled_from(["settle", "reset", "maintain"]))
)


class EpochsMachine(RuleBasedStateMachine):
    """Hosts whose epochs and clocks differ do what they want, and the store loses what it wants."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ObjectStoreModel()
        self.hosts = [ModelHost(self.model, number) for number in HOSTS]
        self.busy = set[int]()

    @rule(number=NUMBERS, ahead=st.integers(0, 100))
    def reset(self, number: int, ahead: int) -> None:
        self.hosts[number].reset(above=self.hosts[number].epoch + ahead)

    @rule(number=NUMBERS, what=st.sampled_from(["settle", "settle", "maintain"]), during=INTERRUPTS)
    def act(self, number: int, what: str, during: dict[int, tuple[int, str]]) -> None:
        operations = count()

        def interrupt() -> None:
            other, action = during.get(next(operations), (number, ""))
            if action and other not in self.busy:
                self.do(other, action)

        self.hosts[number].client.before = interrupt
        self.do(number, what)
        self.hosts[number].client.before = lambda: None

    def do(self, number: int, what: str) -> None:
        host = self.hosts[number]
        self.busy.add(number)
        if what == "settle":
            host.settle()
        elif what == "reset":
            host.reset()
        else:
            host.tier.maintain()
        self.busy.remove(number)

    @rule(number=NUMBERS, key=st.sampled_from([b"a", b"b"]))
    def put(self, number: int, key: bytes) -> None:
        if not self.hosts[number].client.is_cut_off:
            self.hosts[number].put(key)

    @rule(key=st.sampled_from([b"a", b"b"]))
    def find(self, key: bytes) -> None:
        for host in self.hosts:
            if not host.client.is_cut_off:
                assert host.find(key) in (None, host.epoch)

    @rule(number=NUMBERS)
    def restart(self, number: int) -> None:
        """The tier's process is another one. The page of the host is as before."""
        old = self.hosts[number]
        self.hosts[number] = host = ModelHost(self.model, number, old.epoch)
        host.is_unpublished = old.is_unpublished

    @rule(number=NUMBERS, is_cut_off=st.booleans())
    def reach(self, number: int, is_cut_off: bool) -> None:
        self.hosts[number].client.is_cut_off = is_cut_off

    @rule(refusal=st.sampled_from([0, NO_SPACE, TRANSFER_FAILED]))
    def refuse(self, refusal: int) -> None:
        self.model.refusal = refusal

    @rule(data=st.data(), everything=st.booleans())
    def lose(self, data: st.DataObject, everything: bool) -> None:
        if everything:
            self.model.objects.clear()
        elif self.model.objects:
            del self.model.objects[data.draw(st.sampled_from(sorted(self.model.objects)))]

    @rule(text=st.sampled_from([b"", b"7", b"16 9", b"x" * OBJECT_BYTES]))
    def damage(self, text: bytes) -> None:
        self.model.objects[POINTER] = text

    def teardown(self) -> None:
        self.model.refusal = 0
        for host in self.hosts:
            host.client.is_cut_off = False
        # A host that has not published its last reset may draw again, once for each other one.
        for host in self.hosts * len(HOSTS):
            host.settle()
        check_agreement(self.model, self.hosts)
        for host in self.hosts:
            host.tier.maintain()
        check_agreement(self.model, self.hosts)


def test_epochs_hold_whatever_hosts_and_store_do() -> None:
    run_state_machine_as_test(
        EpochsMachine, settings=settings(max_examples=150, stateful_step_count=30)
    )
