"""Asks an OpenAI-compatible server one question and prints the streamed reply: ask.py URL TEXT."""
import json
import sys
import urllib.error
import urllib.request


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    url, text = sys.argv[1:]
    body = {"model": "pocket", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 200, "stream": True}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    shown = None
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    for kind, label in (("reasoning_content", "thinks"), ("content", "says")):
                        piece = choice["delta"].get(kind)
                        if piece:
                            if shown != kind:
                                print(("\n" if shown else "") + f"pocket {label}: ", end="")
                                shown = kind
                            print(piece, end="", flush=True)
    except urllib.error.HTTPError as error:
        sys.exit(f"error: {url} answered {error.code}: {error.read().decode(errors='replace')}")
    print()
    if shown is None:
        sys.exit("error: the reply was empty")


if __name__ == "__main__":
    main()
