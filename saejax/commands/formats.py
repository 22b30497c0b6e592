"""List the formats of dictionaries: which coders each can say, what is read and what is written.

    saejax formats                 the table
    saejax formats saelens         one format, with the reason where a coder is not written

The names are those of `saejax convert --to` and `saejax push --format`.
"""

from saejax.app.command import Command, Line


class Formats(Command, takes="words", answers=True):
    def run(self, line: Line) -> None:
        from saejax.interop import format_table
        from saejax.trained import format_named

        for name in line.words:
            form = format_named(name)
            print(f"{form.title} (--to={form.name}): {form.files}\n")
            for kind, (read, why) in dict(format_table())[form].items():
                print(f"  {', '.join(kind):42} {'read' if read else '':6} {why or 'write'}")
        if line.words:
            return
        for form, cells in format_table():
            print(f"{form.name}: {form.title}; {form.files}")
            rows: dict[str, list[str]] = {}
            for (topology, sparsity), (read, why) in cells.items():
                ways = "+".join(word for word, holds in (("read", read), ("write", not why)) if holds)
                if ways:
                    rows.setdefault(topology, []).append(f"{sparsity} {ways}")
            for topology, cell in rows.items():
                print(f"  {topology:24} {', '.join(cell)}")
            print()
        print(
            "saejax itself: all, coder.safetensors and saejax.json. batchtopk and matryoshka are a jumprelu or topk "
            "after\ntraining. `saejax formats NAME` says why something is not written."
        )
