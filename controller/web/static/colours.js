// The colour of each K: one for skipping, and a ramp of blues over the other candidates of the server.
const dark = matchMedia("(prefers-color-scheme: dark)");
const SKIP = { light: [180, 78, 8], dark: [240, 138, 60] };
const RAMP = { light: [[84, 160, 208], [11, 61, 120]], dark: [[47, 105, 158], [146, 200, 246]] };

export function whenThemeChanges(callback) {
  dark.addEventListener("change", callback);
}

export function colour(steps, candidates) {
  const theme = dark.matches ? "dark" : "light";
  if (steps === 0) return rgb(SKIP[theme]);
  const drafting = candidates.filter((k) => k > 0);
  const place = drafting.length > 1 ? Math.max(drafting.indexOf(steps), 0) / (drafting.length - 1) : 0.7;
  const [from, to] = RAMP[theme];
  return rgb(from.map((value, i) => Math.round(value + place * (to[i] - value))));
}

// Black or white, whichever is read better on it (WCAG's relative luminance).
export function textOn(fill) {
  const [r, g, b] = fill.match(/\d+/g).map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#10161f" : "#fff";
}

export function paint(element, steps, candidates) {
  const fill = colour(steps, candidates);
  element.style.setProperty("--fill", fill);
  element.style.setProperty("--text", textOn(fill));
}

const rgb = ([r, g, b]) => `rgb(${r} ${g} ${b})`;
