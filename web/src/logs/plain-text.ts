/** Program output as safe text: no colors, cursor movements or characters that affect the surrounding page. */

const ESCAPE = "\u001b";
/** Colors and cursor movements (CSI), titles and links (OSC and similar, up to their end), and two-character escapes. */
// eslint-disable-next-line no-control-regex
const SEQUENCES = /\u001b(?:\[[0-?]*[ -/]*[@-~]?|[\]PX^_][^\u0007\u001b\n]*(?:\u0007|\u001b\\)?|[ -/]*[0-~]?)|\u009b[0-?]*[ -/]*[@-~]?/g;
/** Characters that change the text direction or are invisible. */
const UNSEEN = /[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g;
const PICTURES = 0x2400;
const DELETE_PICTURE = "\u2421";

/** `line` without its line end. Of text overwritten with carriage returns (a progress bar), the last version is kept. */
export function plainLine(line: string): string {
  let text = line.includes(ESCAPE) || line.includes("\u009b") ? line.replace(SEQUENCES, "") : line;
  if (text.includes("\r")) text = text.split("\r").findLast((part) => part.trim() !== "") ?? "";
  return text.replace(CONTROLS, picture).replace(UNSEEN, named);
}

function picture(letter: string): string {
  const code = letter.charCodeAt(0);
  return code < 0x20 ? String.fromCharCode(PICTURES + code) : code === 0x7f ? DELETE_PICTURE : named(letter);
}

function named(letter: string): string {
  return `⟨U+${letter.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
}
