"""`trefoil lengths train`: lengths that prompts tell are learned, of several families; other files are refused."""

import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from dispatcher.lengths.process import Predictor, PredictorRefused
from trefoil.cli.main import app
from trefoil.core.errors import InvalidInput, NotFound
from trefoil.profiler.length_training import Answered, read_log, scores, train

WORDS = ("alpha", "beta", "gamma", "delta", "rho")


def log(count: int = 600, seed: int = 1) -> list[Answered]:
    """Answers of `chat` are as long as the first word says, of `echo` twice the prompt; both with noise."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        words = [str(rng.choice(WORDS)) for _ in range(rng.integers(2, 20))]
        prompt = " ".join([*words, str(number)])
        noise = float(rng.lognormal(0.0, 0.1))
        found.append(Answered("chat", f"ask {prompt}", round(noise * 10 * 2 ** WORDS.index(words[0]))))
        found.append(Answered("echo", f"repeat {prompt}", max(1, round(noise * 2 * len(words)))))
    return found


def test_one_predictor_learns_the_lengths_of_two_families_and_the_process_serves_it(tmp_path):
    card = train(log(), tmp_path)
    for family in ("chat", "echo"):
        assert card["families"][family]["rank_correlation"] > 0.8
        assert card["families"][family]["accuracy"] > 0.5 > 0.25
    predictor = Predictor(tmp_path)
    assert predictor.families == ["chat", "echo"]
    shortest, _ = predictor.score("chat", "ask alpha alpha beta")
    longest, _ = predictor.score("chat", "ask rho gamma beta")
    assert shortest < 1 <= 2 < longest
    predictor.learn("chat", "ask alpha alpha beta", 10**6)
    assert predictor.score("chat", "ask alpha alpha beta") == (4.0, True), "the true length of that very prompt"
    assert not predictor.score("echo", "ask alpha alpha beta")[1], "of another family it is not known"
    lines = [{"id": 1, "family": "echo", "prompt": "repeat alpha beta"}, {"family": "echo", "prompt": "x", "tokens": 3}]
    done = subprocess.run(
        [sys.executable, "-m", "dispatcher.lengths.process", str(tmp_path)], check=True, text=True,
        input="".join(json.dumps(line) + "\n" for line in lines), capture_output=True,
    )  # fmt: skip
    ready, answer = map(json.loads, done.stdout.splitlines())
    assert ready == {"families": ["chat", "echo"]}
    assert (answer["id"], answer["cached"]) == (1, False)


def test_shuffled_lengths_teach_nothing(tmp_path):
    mixed, rng = log(), np.random.default_rng(2)
    lengths = rng.permutation([one.tokens for one in mixed]).tolist()
    card = train([Answered("chat", one.prompt, n) for one, n in zip(mixed, lengths, strict=True)], tmp_path)
    assert abs(card["families"]["chat"]["rank_correlation"]) < 0.2


def test_weights_that_are_others_or_of_another_shape_are_refused(tmp_path):
    train(log(), tmp_path)
    np.save(tmp_path / "weights.npy", np.zeros(3, np.float32))
    with pytest.raises(PredictorRefused, match=r"weights.npy has SHA-256 .* Remedy: trefoil lengths train"):
        Predictor(tmp_path)
    (tmp_path / "lengths.json").write_text('{"family": "pydoc", "borders": []}')
    with pytest.raises(PredictorRefused, match="it is `families` now"):
        Predictor(tmp_path)


def test_scores_by_hand():
    tokens, predicted = np.array([1.0, 5.0, 20.0, 60.0]), np.array([2.0, 15.0, 18.0, 100.0])
    found = scores(tokens, predicted, (4.0, 10.0, 30.0, 50.0))
    assert found["accuracy"] == 0.75
    assert found["rank_correlation"] == pytest.approx(1.0)
    assert found["confusion"][1][2] == 1
    assert scores(tokens, np.ones(4), (4.0,))["rank_correlation"] == 0.0


def test_a_log_is_read_line_by_line_and_what_is_none_is_named(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "a", "tokens": 3}\n\n{"prompt": "b", "answer": "two, words", "family": "chat"}\n')
    assert read_log(path, "own") == [Answered("own", "a", 3), Answered("chat", "b", 3)]
    for line in ("[]", "{", '{"prompt": "a"}', '{"prompt": 3, "tokens": 1}', '{"prompt": "a", "tokens": -1}'):
        path.write_text('{"prompt": "a", "tokens": 3}\n' + line)
        with pytest.raises(InvalidInput, match=r"line 2 is not an answer: .* Remedy: write"):
            read_log(path, "own")
    for data, says in (
        (b'{"prompt": "caf\xe9", "tokens": 1}', "can't decode byte 0xe9"),
        (b'{"prompt": "\\ud800", "tokens": 1}', "surrogates not allowed"),
        (b'{"prompt": "a", "tokens": 1, "family": "\\udfff"}', "surrogates not allowed"),
        (b'{"prompt": "a", "tokens": 1' + b"0" * 30 + b"}", "tokens must be 0 to 10,000,000"),
        (b"[" * 100_000, "recursion"),
    ):
        path.write_bytes(b'{"prompt": "a", "tokens": 3}\n' + data)
        with pytest.raises(InvalidInput, match=rf"line = .*line 2 is not an answer: .*{says}.*Remedy: write"):
            read_log(path, "own")
    path.write_text('{"prompt": "a", "tokens": 3}')
    with pytest.raises(InvalidInput, match="line 1 is not an answer"):
        read_log(path, "")
    with pytest.raises(NotFound, match="is not a file"):
        read_log(tmp_path / "none", "own")


def test_the_command_prints_what_it_measured_and_refuses_few_prompts(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [{"prompt": one.prompt, "tokens": one.tokens, "family": one.family} for one in log(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(app, ["lengths", "train", str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "chat" in result.output
    assert "lengths_folder" in result.output
    path.write_text(json.dumps(rows[0]) + "\n")
    result = CliRunner().invoke(app, ["lengths", "train", str(path), "--out", str(tmp_path / "few")])
    assert (result.exit_code, "too few prompts of chat" in result.output) == (2, True)
    assert not (tmp_path / "few").exists()
