"""`llm`, with the models of an extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
from pathlib import Path

address, key, model, text, tokens, _ = sys.argv[1:]
chat = {"model_id": "chat", "model_name": model, "api_base": address, "api_key_name": "ours",
        "supports_schema": True}  # fmt: skip
Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(
    json.dumps([chat, chat | {"model_id": "responses", "responses": True}])  # JSON is YAML, too
)
ANIMAL = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "dog"]}, "tame": {"type": "boolean"}},
    "required": ["kind", "tame"],
    "additionalProperties": False,
}


def llm(*more: str) -> str:
    command = [sys.executable, "-I", "-m", "llm", text, "--key", key, "-o", "max_tokens", tokens]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


told = {}
for way in ("chat", "responses"):
    told[f"text: {way}"] = llm("-m", way, "--no-stream")
    told[f"text: {way} stream"] = llm("-m", way)
    told[f"animal: {way}"] = json.loads(llm("-m", way, "--schema", json.dumps(ANIMAL)))
print(json.dumps(told))
