// What operators took in the steps of the last seconds, from views that each have sums over their new steps:
// { steps, times: [{ name, calls, us }] }.

const RECENT_S = 10;

/** Sums of several views as those of one, the longest operator first. */
export function summed(parts) {
  const times = new Map();
  for (const { name, calls, us } of parts.flatMap((part) => part.times)) {
    const sum = times.get(name) ?? { name, calls: 0, us: 0 };
    times.set(name, { name, calls: sum.calls + calls, us: sum.us + us });
  }
  return { steps: parts.reduce((sum, part) => sum + part.steps, 0), times: [...times.values()].sort((a, b) => b.us - a.us) };
}

/** Takes the sums of a view that came at `now`, s; returns those of the last seconds in which steps were timed. */
export function recent() {
  let kept = [];
  return (part, now) => {
    if (part.steps > 0) kept = [...kept.filter((old) => now - old.now < RECENT_S), { now, ...part }];
    return summed(kept);
  };
}

/** Means of a step: the whole, us, and for each operator its name, calls, us and share, as text. */
export function means({ steps, times }) {
  const all = times.reduce((sum, time) => sum + time.us, 0);
  const lines = times.map(({ name, calls, us }) =>
    [name, (calls / steps).toFixed(calls % steps ? 1 : 0), (us / steps).toFixed(1), `${((100 * us) / Math.max(all, 1e-9)).toFixed(1)} %`]);
  return { us: all / Math.max(1, steps), lines };
}
