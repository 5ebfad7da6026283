"""Which column of a table plays which role, by the usual names in public data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from freescale.config.columns import ORDER

# Without case and signs; the first that a table has counts.
USUAL: dict[str, tuple[str, ...]] = {
    "user": (
        *("userid", "user", "uid", "customerid", "customer", "reviewerid", "visitorid", "visitor"),
        *("memberid", "accountid", "clientid", "personid", "playerid", "profileid", "buyerid"),
        *("username", "reviewer", "useridx", "sessionid", "session"),
    ),
    "item": (
        *("itemid", "item", "iid", "movieid", "movie", "parentasin", "asin", "sku", "skuid"),
        *("productid", "product", "articleid", "article", "stockcode", "videoid", "video"),
        *("trackid", "songid", "artistid", "bookid", "isbn", "gameid", "appid", "goodsid"),
        *("newsid", "contentid", "postid", "adid", "poiid", "venueid", "businessid"),
        *("listingid", "hotelid", "recipeid", "animeid", "beerid", "itemidx", "offerid"),
    ),
    "time": (
        *("timestamp", "unixreviewtime", "unixtimestamp", "unixtime", "time", "ts", "datetime"),
        *("timestampms", "timems", "eventtime", "eventtimestamp", "createdat", "created"),
        *("date", "tdat", "invoicedate", "orderdate", "purchasedate", "eventdate", "visittime"),
        *("reviewtime", "clicktime", "utctime", "checkintime"),
    ),
    "rating": ("rating", "overall", "stars", "ratingscore"),
    "action": ("action", "behavior", "behaviortype", "eventtype"),
}


def find_roles(
    names: Sequence[str], given: Mapping[str, str], roles: Sequence[str] = tuple(USUAL)
) -> dict[str, str]:
    """Finds columns of roles among the `names` of a table. `given` has the user's columns of roles;
    an empty one leaves the role out."""
    found = {}
    plain = {_simplify(name): name for name in reversed(names)}  # of two equal ones, the first
    taken = set(given.values())
    for role in roles:
        if role in given:
            if given[role]:
                found[role] = given[role]
            continue
        for usual in USUAL[role]:
            if usual in plain and plain[usual] not in taken:
                found[role] = plain[usual]
                break
    return found


def require_roles(
    file: object, names: Sequence[str], given: Mapping[str, str], found: Mapping[str, str]
) -> None:
    """Raises ValueError if user, item or time is missing, or one column has two of these roles."""
    for role, name in found.items():
        if name not in names and (role, name) != ("time", ORDER):
            raise ValueError(
                f"{file}: column {name!r}, which --columns names for {role}, is missing; the file "
                f"has {', '.join(names)[:200]}"
            )
        refuse_repeated(file, name, names)
    if found.get("user") is not None and found.get("user") == found.get("item"):
        raise ValueError(
            f"{file}: --columns names {found['user']!r} as user and as item; the file has "
            f"{', '.join(names)[:200]}; name one column for each"
        )
    missing = [role for role in ("user", "item", "time") if role not in found]
    if not missing:
        return
    wanted = ",".join(f"{role}=NAME" for role in missing)
    kept = "".join(f"{role}={name}," for role, name in given.items())
    in_order = f"; if rows are in order of time: --columns {kept}time={ORDER}"
    hint = in_order if missing == ["time"] else ""
    raise ValueError(
        f"{file}: no column is recognised as {' and '.join(missing)} among "
        f"{', '.join(map(repr, names))[:200]}; say which: --columns {kept}{wanted}{hint}"
    )


def require_column(
    file: object, name: str, names: Sequence[str], what: str = "", fix: str = "name one of these"
) -> None:
    """Raises ValueError if a file has no column of this name, or several."""
    if name not in names:
        known = ", ".join(names)[:200]
        raise ValueError(f"{file}: column {name!r}{what} is missing; the file has {known}; {fix}")
    refuse_repeated(file, name, names)


def refuse_repeated(file: object, name: str, names: Sequence[str]) -> None:
    """Raises ValueError if another column has the same name."""
    if (count := list(names).count(name)) > 1:
        raise ValueError(
            f"{file}: {count} columns are named {name!r} among {', '.join(names)[:200]}; "
            "rename all but one"
        )


def _simplify(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
