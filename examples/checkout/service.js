// The payments service, twice: with Oncegate's library (`--protected`), and without. It charges at the bank, and can be told to fail.
import express from 'express';
import { attemptOf, express as once, MemoryStore, Oncegate } from 'oncegate';

const bank = process.env.BANK;
const app = express();
if (process.argv.includes('--protected')) {
  app.use(once(new Oncegate({ store: new MemoryStore() }), { scope: 'single-tenant' }));
}
app.use(express.json());

app.post('/charges', async (req, res) => {
  const { item, amount } = req.body ?? {};
  if (typeof item !== 'string' || !Number.isSafeInteger(amount) || amount < 1 || amount > 100_000) {
    res.status(422).json({ error: 'an item and an amount, please' });
    return;
  }
  // Records in memory die with the process. So the bank gets a key, too, which is the same for each attempt of this payment. Behind the
  // sidecar it is made from the record that the sidecar names.
  const record = req.get('oncegate-record');
  const key = attemptOf(req)?.downstreamKey('bank') ?? (record && `bank-${record}`);
  const response = await fetch(bank, {
    method: 'POST',
    headers: { 'content-type': 'application/json', ...(key && { 'idempotency-key': key }) },
    body: JSON.stringify({ item, amount }),
  });
  const charge = await response.json();
  // The money has moved. This is the worst moment.
  const fault = req.get('x-fault');
  if (fault === 'crash') process.kill(process.pid, 'SIGKILL');
  if (fault === 'slow') await new Promise((done) => { setTimeout(done, 1500); });
  res.status(201).json({ charge: charge.number, item, amount });
});

const server = app.listen(0, '127.0.0.1', () => { console.log(`listening on http://127.0.0.1:${server.address().port}`); });
// The service ends with the process that started it.
process.stdin.on('end', () => { process.exit(0); }).resume();
