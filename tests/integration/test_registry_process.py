"""The registry as its own process."""

import asyncio
import json
import sys
import time

from support.registry import CALL_S, MODEL, Member, Mirror, keys_of, replica_of

from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.registry_client import RegistryClient

START = """
import sys
from kv_registry.worker import main
from kvrelay.config import RegistryConfig
sys.exit(main(RegistryConfig(port=0, redis_url=sys.argv[1])))
"""


async def _address(process: asyncio.subprocess.Process) -> str:
    """Return what the process says that it advertises."""
    while line := await asyncio.wait_for(process.stderr.readline(), CALL_S):
        event = json.loads(line)
        if event["event"] == "server.started":
            return event["address"]
    raise AssertionError("it ended without having started")


async def test_a_signal_ends_it_cleanly_while_it_is_watched(valkey_url):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", START, valkey_url, stderr=asyncio.subprocess.PIPE
    )
    try:
        channel = open_channel(await _address(process))
        client = RegistryClient(channel)
        member = Member(client, replica_of("a"))
        await member.register()
        await member.publish(keys_of(1, 10))
        watch = client.watch(MODEL)
        mirror = Mirror()
        while not mirror.caught_up:
            mirror.apply(await anext(watch))
        assert mirror.holds(member)
        began_s = time.monotonic()
        process.terminate()
        _, _ = await asyncio.wait_for(process.communicate(), CALL_S)
        print(f"ended after {time.monotonic() - began_s:.2f} s")
        assert process.returncode == 0
        await watch.aclose()
        await channel.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
