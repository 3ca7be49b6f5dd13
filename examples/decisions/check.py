"""Ask Sluicegate for a decision before a program serves a request: check.py URL TOKEN CLIENT_IP"""

import json
import sys
import urllib.request

ENDPOINT, TOKEN, CLIENT_IP = sys.argv[1:4]


def check(method, url, headers):
    """Return the decision: `admitted`, and the `status`, `headers` and `body` of a denial."""
    described = {"method": method, "url": url, "client_ip": CLIENT_IP, "headers": headers}
    request = urllib.request.Request(
        f"{ENDPOINT}/v1/check",
        data=json.dumps(described).encode(),
        headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=2) as response:
        return json.load(response)


decision = check("GET", "https://shop.example/orders", {"X-Api-Key": "demo-key"})
if decision["admitted"]:
    print("admitted", decision["headers"]["x-user"])
else:
    print("denied", decision["status"], decision["headers"].get("retry-after"))
