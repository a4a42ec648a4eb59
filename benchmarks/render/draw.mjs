// node draw.mjs CHROMIUM WIDTH DATA.json PICTURE.png [DATA.json PICTURE.png ...]: a picture of each dashboard in a window of
// so many pixels. Prints, as JSON, what each panel shows.
import { readFileSync, rmSync, mkdtempSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';
import puppeteer from 'puppeteer-core';

const [chromium, width, ...pairs] = process.argv.slice(2);
const here = dirname(fileURLToPath(import.meta.url));
const folder = mkdtempSync(join(tmpdir(), 'dashboards-'));
// Grafana's .mjs files import these by their default, which for such files would be the module itself.
const DEFAULTS = /^(react-custom-scrollbars-2|react-highlight-words|calculate-size)$/;
const defaults = {
  name: 'defaults',
  setup: (b) => {
    b.onResolve({ filter: DEFAULTS }, ({ path, namespace }) => (namespace === 'defaults' ? undefined : { path, namespace: 'defaults' }));
    b.onLoad({ filter: /.*/, namespace: 'defaults' }, ({ path }) => ({
      contents: `export { default } from '${path}'; export * from '${path}';`, resolveDir: here,
    }));
  },
};
const loader = { '.ttf': 'empty', '.woff': 'empty', '.woff2': 'file', '.svg': 'text' };
await build({
  entryPoints: [join(here, 'page.jsx')], outfile: join(folder, 'page.js'), bundle: true, minify: true, jsx: 'automatic', logLevel: 'error',
  define: { 'process.env.NODE_ENV': '"production"', global: 'window' }, loader, plugins: [defaults],
});
writeFileSync(join(folder, 'page.html'), '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="page.css"><body style="margin:0"><div id="board"></div><script src="page.js"></script>');
// A busy machine takes minutes for what takes a second.
const browser = await puppeteer.launch({ executablePath: chromium, headless: true, protocolTimeout: 600_000, timeout: 300_000, args: ['--no-sandbox', '--disable-gpu', '--allow-file-access-from-files'] });
const shown = {};
try {
  for (let i = 0; i < pairs.length; i += 2) {
    const page = await browser.newPage();
    page.on('pageerror', (error) => console.error(`${pairs[i]}: ${error.stack ?? error}`));
    page.setDefaultTimeout(300_000);
    await page.setViewport({ width: Number(width), height: 1000 });
    await page.goto(`file://${join(folder, 'page.html')}`);
    await page.evaluate((data) => window.draw(data), JSON.parse(readFileSync(pairs[i], 'utf8')));
    await (await page.$('#board')).screenshot({ path: pairs[i + 1] });
    shown[pairs[i]] = await page.evaluate(() => window.shown());
    await page.close();
  }
} finally {
  await browser.close();
  rmSync(folder, { recursive: true });
}
console.log(JSON.stringify(shown));
