"""What the project's HTML pages have in common: one self-contained document, light and dark, wide and narrow."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1c2330, #e6e9ef); --faint: light-dark(#5b6472, #9aa4b2);
  --ground: light-dark(#ffffff, #12161d); --card: light-dark(#f5f6f8, #1b212b); --line: light-dark(#2457c5, #7aa7ff); }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1400px; background: var(--ground); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .6rem; }
h3 { font-size: .85rem; font-weight: 600; margin: 0 0 .4rem; overflow-wrap: anywhere; }
p { margin: .2rem 0; color: var(--faint); overflow-wrap: anywhere; }
.card { background: var(--card); border-radius: 8px; padding: .7rem; min-width: 0; }
"""


def document(title: str, body: str, style: str = "") -> str:
    """A whole page. ``title`` and ``body`` are HTML already, ``style`` is CSS beside the common one."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}{style}</style>'
        f"{body}</html>\n"
    )
