"""Says what was read as what."""

from __future__ import annotations

from freescale.data.ingest.interactions import Interactions


def describe_interactions(interactions: Interactions) -> list[str]:
    """Lines for people, once all has been read: the roles of columns, and what was left out."""
    layout, files = interactions.layouts[0], interactions.files
    parts = []
    for role, name in (("user", "user_id"), ("item", "item_id"), ("action", "action")):
        if role in layout.roles:
            by_line = role == "user" and layout.format == "sequences"
            source = "line" if by_line else layout.roles[role]
            parts.append(f"{source} -> {role} ({_describe_ids(interactions, name)})")
    times = interactions.times.get(files[0])
    parts.append(f"{times.column} -> time ({times.meaning})" if times else "order -> time")
    if "rating" in layout.roles:
        parts.append(f"{layout.roles['rating']} -> action (twice the rating, rounded)")
    if layout.feedback:
        parts.append(f"{', '.join(layout.feedback)} -> action (as bits)")
    parts += [f"{label.text} -> label" for label in interactions.labels]
    several = len(files) > 1
    about = f"{layout.format}, {len(files):,} files" if several else layout.format
    lines = [f"{files[0]}{' ...' if several else ''} ({about}): {', '.join(parts)}"]
    kept, incomplete = interactions.sides
    used = {*layout.roles.values(), *layout.feedback, *kept}
    used |= {label.column for label in interactions.labels}
    if left := [name for name in layout.names if name not in used]:
        gaps = [name for name in incomplete if name in left]
        why = f" (with missing values: {', '.join(gaps)})" if gaps else ""
        shown = ", ".join(name or "one without a name" for name in left)
        lines.append(f"columns left out: {shown}{why}")
    if count := interactions.empty_files:
        lines.append(f"{count:,} empty file{'s' if count > 1 else ''} left out")
    if interactions.missing_rows:
        lines.append(f"{interactions.missing_rows:,} rows without user, item or time left out")
    return lines


def _describe_ids(interactions: Interactions, name: str) -> str:
    if name == "item_id" and interactions.hashed is not None:
        return interactions.hashed.describe()
    if name not in interactions.reading.coded:
        return "integers"
    count, reason = len(interactions.vocabulary.columns[name]), interactions.reading.coded[name]
    return f"{count:,} {reason}" if reason == "strings" else f"{count:,} {reason}; numbered anew"
