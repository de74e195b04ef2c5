// Numbers as people read them, and elements without any HTML in strings.
export const whole = (value) => Math.round(value).toLocaleString("en");
export const percent = (share, digits = 0) => {
  const text = (100 * Math.abs(share)).toFixed(digits);
  return `${share < 0 && Number(text) !== 0 ? "−" : ""}${text} %`;
};
export const signed = (share) => (Math.round(100 * share) === 0 ? "±0 %" : (share > 0 ? "+" : "") + percent(share));
export const ms = (seconds) => `${(1e3 * seconds).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
// Context regions in thousands of tokens: "1025-4096" is "1k–4k".
export const contextName = (name) =>
  name === "any" ? "any context" : name.replace(/\d+/g, (n) => (n < 1000 ? n : `${Math.round(n / 1024)}k`)).replace("-", "–");
export const batchName = (name) => (name === "any" ? "any" : name.replace("-", "–"));

const SVG = "http://www.w3.org/2000/svg";
export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}
export function html(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}
function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// Writes only what differs: what is not touched is not drawn again, nor read out again.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
