"""Siblings: the other daemons of this host, whose pools this daemon loads blocks from.

    SiblingPeers     finds siblings; one task for each, with a session there     peers.py
    PeerClient       that session: BorrowMemory, Uses                            peer_client.py
    MappedWindows    their pools and tables, mapped read-only; the port of the   windows.py
                     core (core/siblings.py)
    LentTable        searches and compares a block table of a sibling            lent_table.py

The only package of the daemon that imports the client. Event loop only; memory is mapped and
registered on other threads.
"""
