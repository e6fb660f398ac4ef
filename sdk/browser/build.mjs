// Writes the library into dist: three small modules, and their types.
import { execFileSync } from 'node:child_process';
import { rmSync, writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';
import { minify } from 'terser';

const here = fileURLToPath(new URL('.', import.meta.url));
const tsc = fileURLToPath(new URL('./node_modules/typescript/bin/tsc', import.meta.url));
rmSync(new URL('./dist', import.meta.url), { recursive: true, force: true });
execFileSync(process.execPath, [tsc, '-p', here], { stdio: 'inherit' });
for (const name of ['index', 'form', 'react']) {
  // The others share the state of `index`, so it is no part of them.
  const external = name === 'index' ? [] : ['react', './index.js'];
  const bundled = await build({
    entryPoints: [`src/${name}.ts`], external, bundle: true, minify: true, format: 'esm', target: 'es2022', absWorkingDir: here, write: false,
  });
  const { code } = await minify(bundled.outputFiles[0].text, { module: true, ecma: 2022, compress: { passes: 3 } });
  writeFileSync(new URL(`./dist/${name}.js`, import.meta.url), code);
}
