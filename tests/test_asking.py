# SPDX-License-Identifier: Apache-2.0
"""The first word on the store stands, and whoever waits for it hears it, whichever of torch's servers keeps it."""

from __future__ import annotations

from datetime import timedelta
from threading import Event, Thread
from time import sleep

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from commrt.membership.store_client import delete_once, set_once

LIMIT_S = 20.0


@pytest.mark.parametrize("use_libuv", [True, False, None], ids=["libuv", "older", "one process"])
def test_the_first_word_stands_and_whoever_waits_for_it_hears_it(use_libuv):
    if use_libuv is None:
        store = waiting = HashStore()
    else:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
        waiting = store.clone()
    heard, begun = [], Event()

    def listen():
        begun.set()
        waiting.wait(["shelf/word"], timedelta(seconds=LIMIT_S))
        heard.append(waiting.get("shelf/word"))

    listener = Thread(target=listen)
    listener.start()
    begun.wait()
    sleep(0.2)  # nobody says that it waits; too early, and this passes for no reason
    shelf = PrefixStore("shelf", store)
    assert [set_once(shelf, "word", word) for word in ("first", "second")] == ["first", "first"]
    listener.join(LIMIT_S / 2)
    assert heard == [b"first"]


def test_who_settles_what_another_did_not_live_to_say_says_it():
    store = HashStore()
    set_once(store, "word", "first")
    store.delete_key("word")  # as if the one who decided had died before the message left
    set_once(store, "word", "second")
    assert store.get("word") == b"first"


def test_what_was_forgotten_may_be_settled_anew_and_leaves_nothing():
    store = HashStore()
    set_once(store, "word", "first")
    delete_once(store, "word")
    assert store.num_keys() == 0
    assert set_once(store, "word", "second") == "second"
