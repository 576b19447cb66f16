"""The agent of benchmarks/agents/credit.py: calls the policy from inside of a jail, and prints the
ids and the texts of its answers.
"""

import http.client
import json
import os
from urllib.parse import urlsplit

# An SDK would take a second of each sample to import.
url = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=300)
task = json.loads(os.environ["ASYNC_RL_TASK"])
key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
solver = {"X-Async-RL-Role": "solver"}
written = []
for model, role, head in (
    ("policy/planner", "planner", {}),
    ("policy", "solver", solver),
    ("policy", "solver", solver),
    ("policy/judge:untrained", "judge", {}),
    ("policy", "probe", {"X-Async-RL-Role": "probe", "X-Async-RL-Train": "false"}),
):
    message = {"role": "user", "content": f"{role}: {task['prompt']}"[:60]}
    body = json.dumps({"model": model, "messages": [message], "max_tokens": 12})
    connection.request("POST", "/v1/chat/completions", body, {**key, **head})
    reply = json.loads(connection.getresponse().read())
    written.append((reply["id"], reply["choices"][0]["message"]["content"]))
print(json.dumps(written))
