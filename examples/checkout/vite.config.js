import react from '@vitejs/plugin-react';
import { defineConfig } from 'vite';

export default defineConfig({
  plugins: [react()],
  // The library is linked, and must not bring a second React.
  resolve: { dedupe: ['react', 'react-dom'] },
});
