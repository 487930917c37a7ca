"""One at a time has the helm, and nobody keeps it by mistake."""

from __future__ import annotations

import threading

import pytest

from kvferry.daemon.lane.helm import Helm


def test_a_guest_comes_only_where_nobody_is() -> None:
    helm, done = Helm(), list[str]()
    assert not helm.visit(lambda: done.append("at work"))
    helm.leave()
    assert helm.visit(lambda: done.append("left"))
    helm.take()
    assert not helm.visit(lambda: done.append("back"))
    with helm:
        assert helm.lent
        assert helm.visit(lambda: done.append("lent"))
    assert not helm.visit(lambda: done.append("taken back"))
    assert done == ["left", "lent"]
    assert (helm.lent, helm.free) == (False, False)


def test_it_is_given_back_whatever_a_guest_does() -> None:

    def sink() -> None:
        raise ZeroDivisionError

    helm = Helm()
    helm.leave()
    with pytest.raises(ZeroDivisionError):
        helm.visit(sink)
    assert helm.free
    helm.take()
    with pytest.raises(ZeroDivisionError), helm:
        sink()
    assert (helm.lent, helm.free) == (False, False)


def test_a_guest_does_not_lend_it_on() -> None:
    helm, seen = Helm(), list[bool]()

    def lend() -> None:
        with helm:
            seen.append(helm.visit(lambda: None))
            seen.append(helm.lent)

    helm.leave()
    assert helm.visit(lend)
    assert seen == [False, False]
    assert helm.free


def test_who_lent_it_waits_until_the_guest_has_gone() -> None:
    helm, inside, go_on = Helm(), threading.Event(), threading.Event()
    order: list[str] = []

    def stay() -> None:
        inside.set()
        go_on.wait(20)
        order.append("guest")

    with helm:
        guest = threading.Thread(target=helm.visit, args=[stay])
        guest.start()
        assert inside.wait(20)
        threading.Timer(0.02, go_on.set).start()
    order.append("keeper")
    guest.join()
    assert order == ["guest", "keeper"]
