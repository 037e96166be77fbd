"""What an agent sees of a MiniGrid level, in words."""

from typing import Literal, NamedTuple

import numpy as np

Style = Literal["sentences", "words"]
STYLES = ("sentences", "words")

_OPEN_CLOSED_LOCKED = ("open", "closed", "locked")
# Not said one by one: what is not there, or everywhere.
_UNSAID = ("unseen", "empty", "floor", "wall", "agent")


class _Seen(NamedTuple):
    """A thing in view: its name, and where it is from the agent in steps; ``side`` is negative to the left."""

    name: str
    ahead: int
    side: int


def describe_view(image: np.ndarray, carried: tuple[str, str] | None, style: Style) -> str:
    """Describes one observation.

    Args:
        image: minigrid's partial view, uint8 ``[side, depth, 3]`` (object, colour, state): the agent stands in the
            middle of the last row and looks towards row 0. Both sizes are its view size.
        carried: colour and type of what the agent carries.
        style: ``sentences`` or ``words``.

    Returns:
        Things by their distance, nearest first (of equal ones the leftmost), then walls: in sentences the nearest one
        ahead and on each side, in words only one that is right in front of the agent.
    """
    things, walls = _things(image), _walls(image)
    if style == "words":
        said = [f"{thing.name} {_place(thing, style)}" for thing in things]
        said += ["wall 1 ahead"] if (1, 0) in walls else []
        said += [f"carrying {' '.join(carried)}"] if carried else []
        return " , ".join(said) or "nothing"
    lines = ["You see nothing but the floor and walls."]
    if things:
        lines = [f"You see {_join([f'{_article(thing.name)} {_place(thing, style)}' for thing in things])}."]
    if walls:
        places = ", ".join(_place(_Seen("wall", *place), style) for place in walls)
        lines.append(f"There is a wall {places}.")
    if carried:
        lines.append(f"You carry {_article(' '.join(carried))}.")
    return "\n".join(lines)


def _things(image: np.ndarray) -> list[_Seen]:
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

    size = image.shape[0]
    things = []
    for column in range(size):
        for row in range(size):
            kind, colour, state = image[column, row].tolist()
            ahead, side = size - 1 - row, column - size // 2
            # The agent's own place shows what it carries.
            if IDX_TO_OBJECT[kind] in _UNSAID or (ahead, side) == (0, 0):
                continue
            name = f"{IDX_TO_COLOR[colour]} {IDX_TO_OBJECT[kind]}"
            if IDX_TO_OBJECT[kind] == "door":
                name = f"{_OPEN_CLOSED_LOCKED[state]} {name}"
            elif IDX_TO_OBJECT[kind] == "lava":
                name = "lava"
            things.append(_Seen(name, ahead, side))
    return sorted(things, key=lambda thing: (thing.ahead + abs(thing.side), thing.side))


def _walls(image: np.ndarray) -> list[tuple[int, int]]:
    """The nearest wall straight ahead, straight left and straight right, as (ahead, side), of those in view."""
    from minigrid.core.constants import OBJECT_TO_IDX

    size, middle = image.shape[0], image.shape[0] // 2
    kinds = image[..., 0]
    ways = [
        [(ahead, 0) for ahead in range(1, size)],
        [(0, -side) for side in range(1, middle + 1)],
        [(0, side) for side in range(1, middle + 1)],
    ]
    walls = []
    for way in ways:
        found = [place for place in way if kinds[middle + place[1], size - 1 - place[0]] == OBJECT_TO_IDX["wall"]]
        walls += found[:1]
    return walls


def _place(thing: _Seen, style: Style) -> str:
    side = "left" if thing.side < 0 else "right"
    if style == "words":
        return " ".join(f"{n} {way}" for n, way in ((thing.ahead, "ahead"), (abs(thing.side), side)) if n)
    parts = []
    if thing.ahead:
        parts.append(f"{_steps(thing.ahead)} ahead")
    if thing.side:
        parts.append(f"{_steps(abs(thing.side))} to the {side}")
    return " and ".join(parts)


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


def _article(name: str) -> str:
    if name == "lava":
        return name
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}"
