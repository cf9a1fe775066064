"""Stored KV pages: bound to their tokens, model and arithmetic; every byte checked; shared and removed with care."""

from pathlib import Path

import pytest

from colibri.daemon.model_port import PageSection
from colibri.daemon.store.pages import BadPageError, PageChain, PageIdentity, decode_page, encode_header
from testkit.sessions import (
    CONTENT,
    IDENTITY,
    OTHER_CONTENT,
    SECTIONS,
    new_session,
    open_store,
    page_bytes,
    put_pages,
    spoil,
)

TOKENS = list(range(1000, 1150))  # two full pages and one of 22


def test_a_page_is_read_back() -> None:
    name = PageChain(IDENTITY).name(TOKENS, 1)
    page = page_bytes(name)
    data = encode_header(IDENTITY, name, page) + page
    assert len(data) % 512 == 0
    assert decode_page(IDENTITY, name, data) == page


def test_every_region_is_under_a_checksum() -> None:
    name = PageChain(IDENTITY).name(TOKENS, 0)
    page = page_bytes(name)
    data = encode_header(IDENTITY, name, page) + page
    for position in [*range(0, 260, 3), 4000, 4095, *range(4096, len(data), 127), 4096 + 1000, len(data) - 1]:
        flipped = bytearray(data)
        flipped[position] ^= 4
        with pytest.raises(BadPageError):
            decode_page(IDENTITY, name, bytes(flipped))
    with pytest.raises(BadPageError, match="bytes long"):
        decode_page(IDENTITY, name, data[:-1])


def test_the_error_names_the_layer() -> None:
    name = PageChain(IDENTITY).name(TOKENS, 0)
    data = bytearray(encode_header(IDENTITY, name, page_bytes(name)) + page_bytes(name))
    data[4096 + 1500] ^= 1
    with pytest.raises(BadPageError, match=r"layer 1, section kind 1"):
        decode_page(IDENTITY, name, bytes(data))


def test_the_name_binds_tokens_model_and_numerics() -> None:
    def digest(identity: PageIdentity, tokens: list[int], positions: int = 64) -> bytes:
        return PageChain(identity).name(tokens, 1, positions).digest

    other_model = PageIdentity(OTHER_CONTENT, IDENTITY.numerics_id, SECTIONS, 2048)
    other_numerics = PageIdentity(CONTENT, "1/i8/f16/64", SECTIONS, 2048)
    changed_before, changed_inside = [*TOKENS], [*TOKENS]
    changed_before[0] += 1
    changed_inside[127] += 1
    names = [
        digest(IDENTITY, TOKENS),
        digest(IDENTITY, TOKENS, 63),
        digest(other_model, TOKENS),
        digest(other_numerics, TOKENS),
        digest(IDENTITY, changed_before),
        digest(IDENTITY, changed_inside),
    ]
    assert len(set(names)) == len(names)
    assert digest(IDENTITY, TOKENS[:128]) == names[0]


def test_a_page_does_not_pass_for_another_one() -> None:
    chain = PageChain(IDENTITY)
    one, other = chain.name(TOKENS, 0), chain.name(TOKENS, 1)
    data = encode_header(IDENTITY, one, page_bytes(one)) + page_bytes(one)
    with pytest.raises(BadPageError, match="name is"):
        decode_page(IDENTITY, other, data)


def test_sections_must_cover_the_page() -> None:
    with pytest.raises(ValueError, match="starts at 1001"):
        PageIdentity(CONTENT, "n", (SECTIONS[0], PageSection(1, 1, 1, 1001, 1047)), 2048)
    with pytest.raises(ValueError, match="cover 1000 of 2048"):
        PageIdentity(CONTENT, "n", SECTIONS[:1], 2048)


def test_many_sections_get_a_longer_header() -> None:
    sections = tuple(PageSection(i, 1, 1, 8 * i, 8) for i in range(300))
    identity = PageIdentity(CONTENT, "n", sections, 2400)
    assert identity.header_bytes == 12288
    name = PageChain(identity).name(TOKENS, 0)
    assert decode_page(identity, name, encode_header(identity, name, bytes(2400)) + bytes(2400)) == bytes(2400)


def test_stored_pages_come_back_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    stored = new_session(store)
    names = put_pages(store, stored, TOKENS)
    assert stored.kv_position == 150
    store.close()

    store = open_store(tmp_path)
    stored, _ = store.load("alpha")
    assert store.cached_pages(stored, TOKENS, None) == names
    assert [store.read_page(stored, name) for name in names] == [page_bytes(name) for name in names]
    assert store.cached_pages(stored, [*TOKENS, 1, 2, 3], None) == names
    assert [p.positions for p in store.cached_pages(stored, TOKENS[:140], None)] == [64, 64]
    store.close()


def test_pages_are_readable_before_they_are_written(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    stored = new_session(store)
    name = PageChain(store.identity).name(TOKENS, 0)
    stored.waiting[name.file] = page_bytes(name)
    assert store.cached_pages(stored, TOKENS, None) == [name]
    assert store.read_page(stored, name) == page_bytes(name)
    store.close()


@pytest.mark.parametrize("harm", ["flip", "shorten", "empty", "remove"])
def test_a_bad_page_is_set_aside_and_the_pages_before_it_are_used(tmp_path: Path, harm: str) -> None:
    store = open_store(tmp_path)
    stored = new_session(store)
    names = put_pages(store, stored, TOKENS)
    path = stored.folder / "kv" / names[1].file
    data = path.read_bytes()
    if harm == "flip":
        spoil(path, data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    elif harm == "remove":
        path.unlink()
    else:
        spoil(path, data[:5000] if harm == "shorten" else b"")
    assert store.read_page(stored, names[0]) == page_bytes(names[0])
    assert store.read_page(stored, names[1]) is None
    assert store.cached_pages(stored, TOKENS, None) == names[:1]
    assert stored.kv_position == 64
    quarantined = list((tmp_path / "quarantine").glob("*.kvp"))
    assert len(quarantined) == (0 if harm == "remove" else 1)
    # A good page can take its place again.
    assert put_pages(store, stored, TOKENS) == names
    assert store.read_page(stored, names[1]) == page_bytes(names[1])
    store.close()


def test_pages_are_shared_and_go_with_their_last_session(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    one, other = new_session(store, "session-one"), new_session(store, "session-two")
    put_pages(store, one, TOKENS)
    put_pages(store, other, TOKENS[:128])
    pages = list((tmp_path / "pages").glob("*/*.kvp"))
    assert len(pages) == 3
    store.delete("session-one")
    assert len(list((tmp_path / "pages").glob("*/*.kvp"))) == 2
    assert store.ids() == ["session-two"]
    names = store.cached_pages(other, TOKENS, None)
    assert [store.read_page(other, name) for name in names] == [page_bytes(name) for name in names]
    store.delete("session-two")
    assert list((tmp_path / "pages").glob("*/*.kvp")) == []
    assert list((tmp_path / "sessions").glob("*/*")) == []
    store.close()


def test_superseded_tails_are_removed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    stored = new_session(store)
    put_pages(store, stored, TOKENS[:10])
    names = put_pages(store, stored, TOKENS[:70])
    store.keep_pages(stored, names)
    store.flush()
    assert sorted(stored.links) == sorted(name.file for name in names)
    assert len(list((tmp_path / "pages").glob("*/*.kvp"))) == 2
    store.close()


def test_pages_that_no_session_refers_to_are_removed_at_opening(tmp_path: Path) -> None:
    """A crash between writing the page and linking it to the session."""
    store = open_store(tmp_path)
    stored = new_session(store)
    names = put_pages(store, stored, TOKENS)
    (stored.folder / "kv" / names[2].file).unlink()
    store.close()
    store = open_store(tmp_path)
    assert not store.folder.page(names[2].file).exists()
    assert store.folder.page(names[1].file).exists()
    store.close()


def test_a_page_whose_tokens_did_not_reach_the_log_is_never_used(tmp_path: Path) -> None:
    """A crash between the page and the log: the page names tokens that the session does not have."""
    store = open_store(tmp_path)
    stored = new_session(store)
    put_pages(store, stored, TOKENS)
    assert store.cached_pages(stored, TOKENS[:100] + [7] * 50, None) == store.cached_pages(stored, TOKENS[:64], None)
    store.close()
