"""README.md fits on two screens, as GitHub and PyPI show it.

Chromium measures the page; markdown-it, which comes with vLLM, makes its HTML.
"""

from __future__ import annotations

from pathlib import Path

from markdown_it import MarkdownIt

from tests.daemon.chromium import Chromium, require_chromium
from tests.patience import eventually

ROOT = Path(__file__).parents[2]
MOST_PX = 2_200  # two screens of 1,080, and a line or two that another font may wrap
COLUMN_PX = 830  # of text, in the column that GitHub gives a README

# Whichever font is installed, its letters are spaced like those of Noto Sans: of the fonts that
# GitHub's style names, its lines hold the fewest words.
SAMPLE = "when a prompt prefix comes back it is loaded instead of recomputed"
SAMPLE_PX = 516  # in Noto Sans of 16 px
_SPACE_LETTERS = """
const sample = document.createElement("span");
sample.textContent = arguments[0];
sample.style.whiteSpace = "nowrap";
document.body.append(sample);
const missing = (arguments[1] - sample.getBoundingClientRect().width) / arguments[0].length;
sample.remove();
document.body.style.letterSpacing = `${missing}px`;
"""
_WIDE = """
const blocks = [...document.querySelectorAll("table, pre")];
return blocks.filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText);
"""

# What of GitHub's style has a height.
_STYLE = """
body { margin: 0; background: #fff; font: 16px/1.5 sans-serif }
article { width: COLUMNpx; overflow: auto; word-wrap: break-word }
p, ul, table, pre { margin: 0 0 16px }
h1, h2 { margin: 24px 0 16px; border-bottom: 1px solid #ddd; padding-bottom: .3em;
         font-weight: 600; line-height: 1.25 }
h1 { font-size: 2em; margin-top: 0 }
h2 { font-size: 1.5em }
ul { padding-left: 2em }
li + li { margin-top: .25em }
img { max-width: 100%; box-sizing: content-box }
img[align=right] { padding-left: 20px }
table { display: block; width: max-content; max-width: 100%; overflow: auto; border-spacing: 0;
        border-collapse: collapse }
th, td { padding: 6px 13px; border: 1px solid #ddd }
code { font: 85% monospace; letter-spacing: normal; padding: .2em .4em; background: #eee }
pre { padding: 16px; overflow: auto; background: #f6f8fa; font-size: 85%; line-height: 1.45 }
pre code { font-size: 100%; padding: 0; background: none; line-height: inherit }
""".replace("COLUMN", str(COLUMN_PX))


def rendered(text: str) -> str:
    body = MarkdownIt("commonmark").enable("table").render(text)
    base = f'<base href="{ROOT.as_uri()}/">'
    head = f'<meta charset="utf-8">{base}<style>{_STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body><article>{body}</article></body></html>"


def test_readme_fits_on_two_screens(tmp_path: Path) -> None:
    require_chromium()
    page = tmp_path / "readme.html"
    page.write_text(rendered((ROOT / "README.md").read_text()), encoding="utf-8")
    with Chromium(tmp_path) as browser:
        browser.screen(1280, 1080)
        browser.open(page.as_uri())
        eventually(lambda: browser.run("return [...document.images].every(one => one.complete)"))
        missing = "return [...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
        assert browser.run(missing) == []
        assert browser.run("return document.images.length") >= 3
        browser.run(_SPACE_LETTERS, SAMPLE, SAMPLE_PX)
        assert browser.run(_WIDE) == [], "a line that has to be scrolled"
        height = browser.run("return document.querySelector('article').offsetHeight")
    assert height <= MOST_PX, "say less, or make pictures smaller"
