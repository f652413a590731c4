"""``dirstore:///DIRECTORY``: each object is a file of the directory. A whole l2kit adapter; see `DirStoreAdapter`."""

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp

from l2kit import AdapterConfig, Capabilities, ConfigError, KeyInfo, L2Adapter, ObjectKey, StoreStatus


class DirStoreConfig(AdapterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str  # the directory, made when it is missing; whoever names the same one shares its objects


class DirStoreAdapter(L2Adapter[DirStoreConfig]):
    """Writes under a name of its own, then renames: no reader, in any process, sees a part of an object."""

    api_version = (1, 0)  # the contract that this was built for
    config_type = DirStoreConfig
    capabilities = Capabilities(persistent=True, shared=True)

    async def open(self) -> None:
        await self.run_in_thread(lambda: Path(self.config.path).mkdir(parents=True, exist_ok=True))

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        def store() -> None:
            self._path(key).parent.mkdir(parents=True, exist_ok=True)
            fd, unfinished = mkstemp(dir=self._path(key).parent, prefix=".tmp")
            try:
                with open(fd, "wb") as file:
                    file.writelines(data)
                Path(unfinished).replace(self._path(key))
            except BaseException:
                Path(unfinished).unlink(missing_ok=True)
                raise

        await self.run_in_thread(store)
        return StoreStatus.STORED

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        def load() -> int | None:
            with suppress(FileNotFoundError), self._path(key).open("rb") as file:
                for part in into:
                    file.readinto(part)
                return file.seek(0, 2)  # the end, and so the size
            return None  # a miss is a value

        return await self.run_in_thread(load)

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        def size(key: ObjectKey) -> int | None:
            with suppress(FileNotFoundError):
                return self._path(key).stat().st_size
            return None

        return await self.run_in_thread(lambda: [size(key) for key in keys])

    async def delete_one(self, key: ObjectKey) -> bool:
        with suppress(FileNotFoundError):
            await self.run_in_thread(self._path(key).unlink)
            return True
        return False

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        self.check_open()
        for path in await self.run_in_thread(lambda: list(Path(self.config.path).glob("*/*/*"))):
            with suppress(ConfigError, FileNotFoundError):  # unfinished, a stranger's, or gone by now
                key = ObjectKey.parse("/".join(path.parts[-3:]))
                yield KeyInfo(key, (await self.run_in_thread(path.stat)).st_size)

    def _path(self, key: ObjectKey) -> Path:
        return Path(self.config.path, key.encode())
