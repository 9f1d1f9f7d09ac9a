import { readFileSync } from "node:fs";

// Their licenses ask that every copy has the notice; report.html is a copy that people send to each other.
const BUNDLED = ["@preact/signals", "@preact/signals-core", "preact", "uplot"];

export function licenseNotices() {
  const read = (name) => readFileSync(new URL(`node_modules/${name}/LICENSE`, import.meta.url), "utf8");
  const notices = `/*!\n${BUNDLED.map((name) => `${name}\n\n${read(name).trim()}\n`).join("\n")}*/\n`;
  return {
    name: "license-notices",
    generateBundle(_options, bundle) {
      for (const file of Object.values(bundle)) {
        if (file.type === "chunk") file.code = notices + file.code;
      }
    },
  };
}
