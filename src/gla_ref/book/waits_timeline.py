"""A chart: the work and waits of each role of a Hopper kernel, by clocks read inside the kernel (chapter 23).

The bars are measurements of one program on one multiprocessor, from the records "waits".
"""

__all__ = ["spans", "waits_timeline"]

WORKS = "0.85"  # the grey of work; each barrier has a colour of its own


def spans(role: dict) -> list[tuple[str, int, float, float]]:
    """("work" or the barrier waited for, chunk, from, to) of a role's record, in order and in ns; no span is empty."""
    found, last = [], None
    for n, chunk in enumerate(role["chunks"]):
        for i, (site, (began, ended)) in enumerate(zip(role["sites"], chunk, strict=True)):
            if last is not None and began > last:  # before its first wait a role still works on the last chunk
                found.append(("work", role["first"] + n - (i == 0), last, began))
            if ended > began:
                found.append((site, role["first"] + n, began, ended))
            last = ended
    return found


def waits_timeline(data: dict, B: int) -> None:
    """Draw the roles of the fused kernel over time, as they were measured with B sequences.

    Args:
        data: records of the kind "waits" from :func:`gla_ref.results.load`.
        B: sequences of the batch.

    Raises:
        ValueError: no record has clocks at this B.
    """
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    roles = next((r["roles"] for r in data["waits"] if (r["kernel"], r["B"]) == ("fused", B)), None)
    if not roles:
        raise ValueError(f"data: expected clocks of the fused kernel at B = {B}, got none")
    figure, ax = plt.subplots(figsize=(4.7, 3.1))
    colors = {"work": WORKS}
    for role in roles:
        longest = {}
        for site, chunk, began, ended in spans(role):
            color = colors.setdefault(site, f"C{len(colors) - 1}")
            ax.barh(role["role"], (ended - began) / 1e3, left=began / 1e3, color=color)
            if site == "work":
                longest[chunk] = max(longest.get(chunk, (0, 0)), (ended - began, (began + ended) / 2e3))
        for chunk, (lasts, middle) in longest.items():
            ax.text(middle, role["role"], str(chunk) * (lasts > 700), ha="center", va="center", fontsize=11)
    ax.invert_yaxis()
    ax.set_xlabel("µs")
    names = {"work": "works", **{name: f"waits at {name}" for name in colors if name != "work"}}
    handles = [Patch(color=color, label=names[name]) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    plt.show()
