"""The rules of a `BlockIndex`, all of them, checked: tests do so after every step."""

from __future__ import annotations

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.index_entry import Entry, State
from vllm_tiered_kv.errors import InvariantError


def check_index(index: BlockIndex) -> None:
    """Raises InvariantError unless every rule holds."""
    index._pool.check(set(index._entries))
    if {index._entries[slot].key for slot in index._slot_of.values()} != set(index._slot_of):
        raise InvariantError("a key points at a slot that holds another")
    committed_keys = {e.key for e in index._entries.values() if e.state is State.COMMITTED}
    if committed_keys != index._readable:
        raise InvariantError("what is said to be readable is not what is committed")
    for slot, entry in index._entries.items():
        _check_entry(index, slot, entry)
    for parent_key, waiting in index._orphans.items():
        if not waiting or parent_key in index._slot_of:
            raise InvariantError("an orphan waits for a block that is here")
        for slot in waiting:
            orphan = index._entries[slot]
            if orphan.parent is not None or orphan.parent_key != parent_key:
                raise InvariantError(f"slot {slot} is an orphan of the wrong block")
    for size_class, policy in enumerate(index._policies):
        committed = {
            slot
            for slot, entry in index._entries.items()
            if entry.state is State.COMMITTED and entry.size_class == size_class
        }
        if policy.slots() != committed:
            raise InvariantError(f"the policy of class {size_class} knows other slots")
        leaves = {slot for slot in committed if not index._entries[slot].followers}
        if policy.leaves() != leaves:
            raise InvariantError(
                f"the policy of class {size_class} offers {len(policy.leaves())} leaves, "
                f"there are {len(leaves)}"
            )


def _check_entry(index: BlockIndex, slot: int, entry: Entry) -> None:
    if index._pool.class_of(slot) != entry.size_class:
        raise InvariantError(f"slot {slot} lies in a slab of another class")
    visible = index._slot_of.get(entry.key) == slot
    if visible != (entry.state in (State.RESERVED, State.COMMITTED)):
        raise InvariantError(f"slot {slot} is {entry.state} and visible: {visible}")
    if entry.pins < 0 or (entry.pins and entry.state is State.RESERVED):
        raise InvariantError(f"slot {slot} has {entry.pins} pins while {entry.state}")
    if entry.parent is not None:
        above = index._entries.get(entry.parent)
        if above is None or slot not in above.followers or above.key != entry.parent_key:
            raise InvariantError(f"slot {slot} follows a block that does not know it")
    elif (
        visible
        and entry.parent_key is not None
        and slot not in index._orphans.get(entry.parent_key, ())
    ):
        raise InvariantError(f"slot {slot} lost the block it follows")
    for follower in entry.followers:
        if index._entries[follower].parent != slot:
            raise InvariantError(f"slot {slot} has a follower that follows another")
