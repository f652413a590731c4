"""All benchmarks, each a module with ``measure``: ``python -m bench.run [--quick] [--json FILE] [NAME …]``."""

from __future__ import annotations

from bench import hung, nixl, nvme, posix, resp, s3, submit
from bench.pairs import run_all

if __name__ == "__main__":
    run_all(
        {
            "submit": submit.measure,
            "hung": hung.measure,
            "posix": posix.measure,
            "nvme": nvme.measure,
            "resp": resp.measure,
            "s3": s3.measure,
            "nixl": nixl.measure,
        },
        "Paired benchmarks; ratios, not claims.",
        by_name=True,
    )
