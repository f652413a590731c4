"""``fault+…`` in URLs and files, its errors, that no secret shows, and that the page about it is true."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from l2kit.config import build, load_storage_config, parse_url
from l2kit.errors import ConfigError
from l2kit.faults import KINDS, OPERATIONS, FaultOptions, FaultyAdapter
from l2kit.registry import options_of
from l2kit.testing import FaultyAdapter as PublishedFaultyAdapter
from tests.unit.fault_bench import adapter_of, key, raw, registry

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "rehearse-an-outage.md"

pytestmark = pytest.mark.anyio


class TestConfiguration:
    def test_a_url(self) -> None:
        adapter = adapter_of(
            "fault+memory://?fault.seed=7&max_bytes=1MiB&fault.load=latency:0.05~0.3,flip@3&fault.store=slow:1MiB@2-"
        )
        assert adapter.options == FaultOptions(seed=7, load=("latency:0.05~0.3", "flip@3"), store=("slow:1MiB@2-",))
        assert (adapter.name, adapter.config.max_bytes) == ("memory", 1 << 20)  # type: ignore[attr-defined]

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "l2kit.toml"
        path.write_text(
            """
            [[tiers]]
            url = "fault+memory://"
            name = "shared"
            fault = { seed = 7, load = ["latency:0.05~0.3", "flip@3"], lookup = "lie" }

            [[tiers]]
            url = "fault+memory://?fault.seed=1"
            "fault.store" = "full@10-"
            """
        )
        first, second = (adapter_of(tier) for tier in load_storage_config(path).tiers)
        assert first.name == "shared"
        assert first.options == FaultOptions(seed=7, load=("latency:0.05~0.3", "flip@3"), lookup=("lie",))
        assert second.options == FaultOptions(seed=1, store=("full@10-",))

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("fault+memory://?fault.load=flipp", "fault: load: 'flipp': unknown kind 'flipp'; did you mean 'flip'?"),
            ("fault+memory://?fault.load=lost", "fault: load: 'lost': lost is no fault of load, only of store"),
            ("fault+memory://?fault.lod=flip", "fault: unknown option 'lod'; did you mean 'load'?"),
            ("fault+memory://?max_byte=3", "memory: unknown option 'max_byte'; did you mean 'max_bytes'?"),
        ],
    )
    def test_errors_name_the_field_and_the_nearest_choice(self, url: str, message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            adapter_of(url)
        assert str(caught.value) == message

    def test_secrets_are_not_shown(self) -> None:
        with pytest.raises(ConfigError) as caught:
            registry().adapter("fault+memory://user:hunter2@host/?fault.load=flip")
        assert "hunter2" not in str(caught.value)
        config = load_storage_config({"tiers": ["fault+redis://user:hunter2@host/?fault.load=flip"]})
        assert "hunter2" not in repr(config)

    async def test_a_log_line_says_that_a_plan_is_at_work(self, caplog: pytest.LogCaptureFixture) -> None:
        async with adapter_of("fault+memory://"):
            assert not caplog.text
        async with adapter_of("fault+memory://?fault.load=error@3"):
            assert "memory: faults are injected on purpose: FaultOptions(load=('error@3',))" in caplog.text

    def test_it_is_published_for_tests(self) -> None:
        assert PublishedFaultyAdapter is FaultyAdapter


class TestPage:
    """What `docs/how-to/rehearse-an-outage.md` shows is so."""

    text = PAGE.read_text(encoding="utf-8")

    def test_every_configuration_is_taken(self) -> None:
        configurations = re.findall(r"^```toml\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE)
        assert len(configurations) == 6
        for configuration in configurations:
            [tier] = tomllib.loads(configuration)["tiers"]
            assert not build(FaultOptions, tier["fault"], where="fault").plan().is_empty

    def test_the_url_says_what_the_table_says(self) -> None:
        [address] = re.findall(r"`(fault\+redis://\S*\?\S*)`", self.text)
        [tier] = tomllib.loads(re.findall(r"^```toml\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE)[0])["tiers"]
        ours, others = options_of("fault", parse_url(address).query)
        assert others == {}
        assert build(FaultOptions, ours, where="fault") == build(FaultOptions, tier["fault"], where="fault")

    def test_the_table_has_every_kind_and_operation(self) -> None:
        rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in self.text.splitlines() if row[:1] == "|"]
        start = next(index for index, row in enumerate(rows) if row[0] == "kind")
        assert tuple(rows[start][2:]) == OPERATIONS
        shown = {
            row[0].strip("`").partition(":")[0]: tuple(
                operation for operation, cell in zip(OPERATIONS, row[2:], strict=True) if cell == "x"
            )
            for row in rows[start + 2 :]
        }
        assert shown == dict(KINDS)

    async def test_the_example_runs(self) -> None:
        [example] = re.findall(r"^```python\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE)
        module: dict[str, Any] = {}
        exec(compile(example, PAGE.name, "exec"), module)
        await module["load_with_a_flipped_bit"](key(), raw(b"some bytes"))
