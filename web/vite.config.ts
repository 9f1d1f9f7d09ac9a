import { defineConfig } from "vite";
import { licenseNotices } from "./license-notices.js";

// One script and one style sheet: the hub serves them, and report.html carries them inside.
export default defineConfig({
  base: "./",
  plugins: [licenseNotices()],
  build: {
    outDir: "../src/stepscope/page/static",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    cssCodeSplit: false,
    modulePreload: false,
    rollupOptions: { output: { codeSplitting: false } },
  },
  // `npm run dev` beside `stepscope serve`
  server: { proxy: { "/api": "http://127.0.0.1:7070" } },
});
