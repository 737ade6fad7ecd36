"""docs/points.md says what model.points does."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.config import SIZES
from model.errors import UnknownPoint
from model.names import ALIASES, KINDS
from model.points import MAX_NAMES, MAX_UNITS, Point, parse_point, parse_points

GPT2 = SIZES["gpt2"]
PAGE = (Path(__file__).parents[2] / "docs/points.md").read_text()


def named(spec: str) -> str:
    return ",".join(map(str, parse_points([spec], GPT2).points))


def section(title: str) -> str:
    found = re.search(rf"^#+ {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def rows(title: str) -> Iterator[list[str]]:
    for line in re.findall(r"^\| (`.*) \|$", section(title), re.MULTILINE):
        yield [cell.strip() for cell in line.split(" |")]


def quoted(cell: str) -> list[str]:
    """The names in a cell, at layer 3."""
    names = (name.replace("(n_layer-1)", "11") for name in re.findall("`(.*?)`", cell))
    return [re.sub(r"(?<=[.\[])l(?=[.\]]|$)", "3", name.replace("n_layer", "12")) for name in names]


def test_the_page_lists_every_point_in_order() -> None:
    letters = {"one": "1", "n_embd": "C", "n_head": "H", "d_head": "D", "n_inner": "4C"}
    letters |= {"n_vocab": "V", "key": "p+1", "id_logit": "2", "top": "10"}
    listed = list(rows("Every point"))

    assert [quoted(row[0]) for row in listed] == [
        [kind.pattern.replace("{l}", "3")] for kind in KINDS.values()
    ]
    for name, _, shape, axes, edit, extra in listed:
        point = Point(name.strip("`").partition(".")[0])
        assert shape == f"[{', '.join(letters[axis] for axis in point.axes)}]"
        assert quoted(axes) == list(point.axes)
        assert (edit, extra) == ("yes" if point.is_editable else "no", "yes" * point.costs_extra)


def test_the_page_tells_what_other_names_stand_for() -> None:
    for points, *columns in rows("Other systems' names"):
        for alias in quoted(" ".join(columns)):
            assert named(alias) == ",".join(quoted(points)), alias


def test_the_page_lists_every_alias() -> None:
    listed = {
        name for _, *columns in rows("Other systems' names") for name in quoted(" ".join(columns))
    }
    listed |= {name.removeprefix("transformer.") for name in listed}
    listed |= {name.replace("h[3]", "h.3") for name in listed}
    listed |= {re.sub(r"\.output(\[0\])?$", "", name) for name in listed}

    assert {alias.replace("{l}", "3") for alias in ALIASES} == listed - {"hidden_states[12]"}


def test_the_page_gives_every_reason_to_refuse() -> None:
    refused = [name for row in rows("Names that are no points") for name in quoted(row[0])]
    reasons = set()
    for name in refused:
        with pytest.raises(UnknownPoint) as caught:
            parse_points([name], GPT2)
        reasons.add(caught.value.reason)

    assert all(reasons)
    assert len(reasons) == len(list(rows("Names that are no points")))


def test_the_page_names_what_can_be_read_but_not_edited() -> None:
    told = section("Editing under another name").split("To edit")[0]
    names = [name for name in quoted(told) if "." in name]

    assert len(names) == 5
    for name in names:
        assert named(name)
        with pytest.raises(UnknownPoint, match="pass by"):
            parse_point(name, GPT2)


def test_the_page_tells_the_limits() -> None:
    assert f"at most {MAX_UNITS}." in PAGE
    assert f"ask for {MAX_NAMES} names" in PAGE
