// Views of the engine as they come. Read with fetch, because a key travels in a header, which EventSource cannot send.

const AGAIN_MS = 2000;

/** Calls `show` with every view and `say` with what is wrong; returns a function that ends it. */
export function follow({ show, say, key, needKey }) {
  const stop = new AbortController();
  const again = () => new Promise((resolve) => setTimeout(resolve, AGAIN_MS));

  async function once() {
    const headers = key() ? { authorization: `Bearer ${key()}` } : {};
    const answer = await fetch("api/live", { headers, signal: stop.signal });
    if (answer.status === 401) {
      needKey();
      return false;
    }
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return true;
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      // Of several that came together only the last is still true, but steps are in each.
      for (const event of events.filter((text) => text.startsWith("data: "))) {
        const view = JSON.parse(event.slice(6));
        if (view.gone) {
          say(view.gone);
          return false;
        }
        if (view.late) say(view.late);
        else show(view);
      }
    }
  }

  (async () => {
    while (!stop.signal.aborted) {
      try {
        if (!(await once())) return;
        say("The server closed the stream; asking again.");
      } catch (error) {
        if (stop.signal.aborted) return;
        say(`No view: ${error.message}; asking again.`);
      }
      await again();
    }
  })();
  return () => stop.abort();
}
