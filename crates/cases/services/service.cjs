// A service on Express. It asks the case for the response to each request.
const express = require('express');

const app = express();
app.disable('x-powered-by');

async function ask(address, execution) {
  const response = await fetch(`http://${address}/`, { method: 'POST', body: JSON.stringify(execution) });
  return response.json();
}

app.use(async (req, res) => {
  const parts = [];
  for await (const part of req) parts.push(part);
  const { rawHeaders: raw } = req;
  const response = await ask(req.get('x-case'), {
    method: req.method,
    target: req.originalUrl,
    fields: raw.flatMap((name, i) => (i % 2 ? [] : [[name, raw[i + 1]]])),
    body: Buffer.concat(parts).toString('hex'),
  });
  res.status(response.status);
  for (const [name, value] of response.fields) res.append(name, value);
  res.send(Buffer.from(response.body, 'hex'));
});

const server = app.listen(0, '127.0.0.1', (error) => {
  if (error) throw error;
  console.log(`listening on http://127.0.0.1:${server.address().port}`);
});
