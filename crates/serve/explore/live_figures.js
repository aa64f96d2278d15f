// Pictures of the live view on canvases: pools unit by unit, steps over time. Canvases, because ten thousand units change
// several times a second. Colours are read from the style sheet, so both themes hold.

export const USES = [
  ["free", "--line"], ["one request, for its life", "--c4"], ["window and state", "--window"], ["kept checkpoint", "--index"],
  ["kept entries", "--c128"], ["read by several", "--ink"],
];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A context in CSS pixels whose canvas fills its width. */
function sized(canvas, height) {
  const width = canvas.clientWidth;
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return [pen, width];
}

/** Size of a unit's square so that `total` of them fit into `width` without growing tall. */
export function unitSize(total, width) {
  const most = Math.sqrt((width * 220) / Math.max(1, total));
  return Math.max(3, Math.min(14, Math.floor(most)));
}

/** Draws a pool with squares of `size`; returns how many units have each use. */
export function drawPool(canvas, pool, size) {
  const columns = Math.max(1, Math.floor((canvas.clientWidth || 300) / size));
  const [pen] = sized(canvas, Math.ceil(pool.total / columns) * size);
  const gap = size > 4 ? 1 : 0.5;
  const counts = USES.map(() => 0);
  // One path per use: ten thousand squares are six fills.
  const paths = USES.map(() => new Path2D());
  let at = 0;
  for (let run = 0; run < pool.runs.length; run += 2) {
    const [use, count] = [pool.runs[run], pool.runs[run + 1]];
    counts[use] += count;
    // A run is cut at the ends of rows.
    for (let left = count; left > 0;) {
      const [row, column] = [Math.floor(at / columns), at % columns];
      const here = Math.min(left, columns - column);
      if (size <= 4) paths[use].rect(column * size, row * size, here * size - gap, size - gap);
      else for (let unit = 0; unit < here; unit++) paths[use].rect((column + unit) * size, row * size, size - gap, size - gap);
      at += here;
      left -= here;
    }
  }
  paths.forEach((path, use) => {
    if (!counts[use]) return;
    pen.fillStyle = colour(USES[use][1]);
    pen.fill(path);
  });
  return counts;
}

const WIDE = 5;

/** Draws the last steps: height is wall time, colour what they held, with the planning on top. `steps` are
 * [number, us, prompt, output, running, us in the backend]. */
export function drawSteps(canvas, steps) {
  const height = 140;
  const [pen, width] = sized(canvas, height);
  const shown = steps.slice(-Math.floor((width - 56) / WIDE));
  const most = Math.max(1000, ...shown.map((step) => step[1]));
  pen.font = "12px system-ui, sans-serif";
  pen.textAlign = "right";
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(8 + (height - 16) * (1 - share)) + 0.5;
    pen.strokeStyle = colour(share ? "--line" : "--strong-line");
    pen.beginPath();
    pen.moveTo(56, y);
    pen.lineTo(width, y);
    pen.stroke();
    pen.fillStyle = colour("--soft");
    pen.fillText(`${((most * share) / 1000).toFixed(most < 10_000 ? 1 : 0)} ms`, 50, y + 4);
  }
  shown.forEach(([, us, prompt, output, , run], index) => {
    pen.fillStyle = colour(prompt && output ? "--c128" : prompt ? "--window" : output ? "--c4" : "--other");
    const tall = Math.max(1, ((height - 16) * us) / most);
    const left = width - (shown.length - index) * WIDE;
    pen.fillRect(left, height - 8 - tall, WIDE - 1, tall);
    pen.fillStyle = colour("--ink");
    pen.fillRect(left, height - 8 - tall, WIDE - 1, (tall * (us - run)) / Math.max(1, us));
  });
}
