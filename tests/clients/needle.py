"""Recall of facts hidden in a long text, asked through the HTTP server: python needle.py BASE_URL --tokens 8192

The text is prose with single-sentence facts at evenly spread depths; each question is one chat request. Prose comes
from --filler FILE (paragraphs separated by blank lines) or, without it, from the served model itself, sampled once.
Exits 1 when fewer than --least of the questions are answered right. Standard library only."""
import argparse, json, random, sys, time, urllib.request
from concurrent.futures import ThreadPoolExecutor

A = "ba be bo da de do fa fe ga go ha he ka ke ko la le lo ma me mo na ne no pa pe ra re ro sa se so ta te to".split()
B = "bran dor fin gar hal kin lan mar nor pell quin ron sel tan ven wick zel mond rick lock ster vin well ford".split()
ANIMALS = "cat dog horse goat sheep cow duck goose fox wolf bear owl crow mouse frog snake lion tiger pig donkey".split()
FRUITS = "apple pear plum cherry grape lemon orange banana peach melon mango fig date kiwi berry".split()
CITIES = "Paris London Rome Madrid Berlin Vienna Prague Oslo Dublin Lisbon Athens Warsaw Helsinki Cairo Tokyo".split()


def digits(r, n):
    return "".join(r.choice("0123456789") for _ in range(n))


# (value, statement, question, answer)
FACTS = [
    (lambda r: digits(r, 5), "The secret code of {k} is {v}.", "What is the secret code of {k}?", "The secret code of {k} is {v}."),
    (lambda r: digits(r, 3), "{k} stays in room {v}.", "In which room does {k} stay?", "{k} stays in room {v}."),
    (lambda r: r.choice(CITIES), "{k} lives in {v}.", "Where does {k} live?", "{k} lives in {v}."),
    (lambda r: r.choice(ANIMALS), "{k} has a {v} as a pet.", "What pet does {k} have?", "{k} has a {v} as a pet."),
    (lambda r: r.choice(FRUITS), "The favorite fruit of {k} is the {v}.", "What is the favorite fruit of {k}?", "The favorite fruit of {k} is the {v}."),
]


def post(base, path, body):
    q = urllib.request.Request(base + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(q, timeout=3600) as f:
        return json.load(f)


def chat(base, model, text, **more):
    body = dict(model=model, messages=[dict(role="user", content=text)], thinking={"type": "disabled"}, **more)
    return post(base, "/chat/completions", body)


def prose(base, model, tokens, r):
    """paragraphs sampled from the served model"""
    starts = ["The man went to the old house and", "In the morning the king", "She looked at the river and", "There was once a poor fisherman who",
              "The captain of the ship", "When the winter came, the children", "The old woman sat by the fire and", "It was late when the doctor"]
    # Enough variety: at most 16,000 tokens are sampled and then used again in another order.
    need = min(tokens, 16000)
    jobs = [(f"Continue this text: {r.choice(starts)}", r.randrange(1 << 30)) for _ in range(need // 250 + 1)]
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda j: chat(base, model, j[0], max_tokens=256, temperature=1.0, seed=j[1])["choices"][0]["message"]["content"], jobs))
    return [t.strip() for t in texts if len(t.strip()) > 80]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("base")
    p.add_argument("--model", default="longwave-tiny")
    p.add_argument("--tokens", type=int, default=8192)
    p.add_argument("--questions", type=int, default=8)
    p.add_argument("--facts", type=int, default=12)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--filler")
    p.add_argument("--least", type=int)
    a = p.parse_args()
    r = random.Random(a.seed)
    if a.filler:
        pars = [x.strip() for x in open(a.filler, encoding="utf8").read().split("\n\n") if x.strip()]
        start = r.randrange(max(1, len(pars) // 2))
        pars = pars[start:] + pars[:start]
    else:
        pars = prose(a.base, a.model, a.tokens, r)
    # The tokens of a text are counted by the server: one request of one token.
    sample = "\n\n".join(pars[:60])
    rate = len(sample) / chat(a.base, a.model, sample, max_tokens=1)["usage"]["prompt_tokens"]
    want, body, size = int(a.tokens * rate), [], 0
    while size < want - 1200:
        for t in pars:
            body.append(t)
            size += len(t) + 2
            if size >= want - 1200:
                break
        r.shuffle(pars)
    facts, used = [], set()
    while len(facts) < a.facts:
        k = (r.choice(A) + r.choice(B)).capitalize()
        if k not in used:
            used.add(k)
            v, s, q, ans = r.choice(FACTS)
            v = v(r)
            facts.append([x.format(k=k, v=v) for x in (s, q, ans)])
    for i, f in reversed(list(enumerate(facts))):
        body.insert(int(len(body) * (i + r.random()) / len(facts)), f[0])
    text = "Read the following text carefully.\n\n" + "\n\n".join(body) + "\n\n"
    right = 0
    for s, q, ans in r.sample(facts, a.questions):
        t = time.time()
        out = chat(a.base, a.model, text + q, max_tokens=40, temperature=0)
        dt = time.time() - t
        got = out["choices"][0]["message"]["content"]
        # A leading space is no failure of recall.
        got = got.strip()
        right += got == ans
        n = out["usage"]["prompt_tokens"]
        print(f"{'ok  ' if got == ans else 'MISS'} {n} tokens, {dt:.1f} s, {n / dt:.0f} tokens/s: {q} {got!r}" + ("" if got == ans else f" (expected {ans!r})"), flush=True)
    least = a.questions if a.least is None else a.least
    print(f"{right} of {a.questions} right")
    sys.exit(right < least)


if __name__ == "__main__":
    main()
