"""Siblings: the pools of the other daemons of this host, as the fastest tier.

Runs in the process of a tier (tier_worker.py), so that a sibling that is stopped, slow or hostile
cannot delay the daemon.

    SiblingsTier   finds siblings, and answers the daemon's requests        tier.py
    SiblingLink    the session at one sibling, for one namespace            sibling_link.py
    KeyFeed        applies its key events                                   key_feed.py
    KeyTable       which keys the sibling has, compactly                    key_table.py
                   the daemon reads it, too: it does not store those keys
    MappedPool     its pool, mapped read-only, to copy blocks               mapped_pool.py

In the daemon:

    MappedWindows  the pools, mapped read-only, to load blocks directly     lent_memory.py
"""
