"""Text that comes in pieces is the text that comes at once."""

from hypothesis import given, settings
from hypothesis import strategies as st

from int4moe_ipex.serve.text import Detokenizer, StopStrings


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.put(token) for token in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 1023), max_size=40))
@settings(max_examples=200, deadline=None)
def test_pieces_join_to_the_decoded_text(tokenizer, ids):
    assert "".join(pieces(tokenizer, ids)) == decode(tokenizer, ids)


def test_a_character_of_several_tokens_comes_whole(tokenizer):
    text = "naïve – 漢字 🙂 end"
    got = pieces(tokenizer, tokenizer(text).input_ids)
    assert "".join(got) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in got)


def first_stop(text, stops):
    """The text before the stop string that ends first, and whether there is one."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_whatever_the_pieces(parts, stops):
    filtered = StopStrings(stops)
    out = "".join(filtered.put(part) for part in parts)
    if not filtered.found:
        out += filtered.flush()
    assert (out, filtered.found) == first_stop("".join(parts), stops)


def test_nothing_of_a_stop_string_gets_out():
    filtered = StopStrings(("</s>",))
    assert [filtered.put(part) for part in ("a<", "/s", "x</", "s>", "more")] == ["a", "", "</sx", "", ""]
    assert filtered.found and filtered.flush() == ""
