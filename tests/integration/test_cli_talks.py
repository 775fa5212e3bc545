"""Commands that ask a router, against one of which only the text is false."""

import asyncio
import io
import json

import pytest
from support.fake_router import FakeRouter, routing
from support.rpc import WAIT_S

from kvrelay.cli.main import main as kvrelay
from kvrelay.errors import ResourceExhausted


async def run(router, *words):
    """Run a command beside the router's event loop; return its exit code."""
    async with routing(router) as address:
        command = [words[0], "--address", address, *words[1:]]
        return await asyncio.wait_for(asyncio.to_thread(kvrelay, command), WAIT_S)


@pytest.fixture
def typed(monkeypatch):
    """Type lines at the terminal, then end the input."""

    def type_lines(*lines):
        waiting = iter(lines)

        def read(_prompt):
            line = next(waiting, None)
            if line is None:
                raise EOFError
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)

    return type_lines


async def test_one_message_is_answered_on_stdout_alone(capsys):
    router = FakeRouter()
    assert await run(router, "chat", "Why?", "--system", "Be brief.", "--max-tokens", "9") == 0
    shown = capsys.readouterr()
    assert shown.out == "The sky\n"
    assert [message.role for message in router.asked[0].chat.messages] == ["system", "user"]
    assert router.asked[0].sampling.max_tokens == 9


async def test_a_conversation_remembers_and_stays_in_one_session(capsys, typed):
    router = FakeRouter()
    typed("Why?", "   ", "And then?")
    assert await run(router, "chat") == 0
    assert capsys.readouterr().out == "The sky\nThe sky\n\n"
    first, second = router.asked
    assert [(message.role, message.content) for message in second.chat.messages] == [
        ("user", "Why?"),
        ("assistant", "The sky"),
        ("user", "And then?"),
    ]
    assert first.session
    assert first.session == second.session


async def test_a_conversation_goes_on_after_an_error_and_forgets_the_unanswered_message(capsys, typed):
    class Moody(FakeRouter):
        async def _answer(self):
            if len(self.asked) == 1:
                raise ResourceExhausted("full")
            async for response in super()._answer():
                yield response

    router = Moody()
    typed("Why?", "Again?")
    assert await run(router, "chat") == 0
    shown = capsys.readouterr()
    assert "kvrelay: full" in shown.err
    assert "The sky" in shown.out
    assert [message.content for message in router.asked[1].chat.messages] == ["Again?"]


async def test_text_to_continue_may_come_from_stdin_and_the_cost_is_told_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon"))
    router = FakeRouter()
    assert await run(router, "generate", "-", "--stats") == 0
    shown = capsys.readouterr()
    assert router.asked[0].text == "Once upon"
    assert shown.out == "The sky\n"
    assert "\ndecode-0 (cold) | prompt 3 tokens" in shown.err


async def test_status_is_a_table_for_people_and_json_for_programs(capsys):
    assert await run(FakeRouter(), "status") == 0
    table = capsys.readouterr().out
    assert "fleet ready" in table
    assert "prefill-0" in table
    assert await run(FakeRouter(), "status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["replicas"][0]["peer"]["replica_id"] == "prefill-0"


async def test_an_error_amid_an_answer_gives_an_exit_code(capsys):
    assert await run(FakeRouter(cut=True), "chat", "Why?") == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("The sky")
    assert "before its finish" in shown.err
